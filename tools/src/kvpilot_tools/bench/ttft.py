"""Our engine with the real model under the stress of kvpilot-bench: `make bench-ttft`.

Starts the engine on loopback, runs kvpilot-bench against it with its defaults and whatever options are given, writes
build/bench/ttft.json and ttft.png.
"""

from __future__ import annotations

import os
import sys

from kvpilot_tools.bench import stress
from kvpilot_tools.bench.peer_layout import benchmark_model
from kvpilot_tools.bench.server_process import start_server
from kvpilot_tools.bench.server_specs import kvpilot_spec
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.repository import BUILD


def main(argv: list[str]) -> int:
    """Arguments are passed on to kvpilot-bench; returns its exit code."""
    progress = Progress()
    spec = kvpilot_spec(benchmark_model(), num_threads=len(os.sched_getaffinity(0)))
    folder = BUILD / "bench"
    with start_server(spec, log=BUILD / "logs" / "bench-ttft.log", on_wait=progress.beat) as server:
        progress.line(f"the engine is ready after {server.startup_s:.1f} s")
        ours = ["--url", server.url, "--pid", str(server.process.pid), "--json-line"]
        ours += ["--json", str(folder / "ttft.json"), "--png", str(folder / "ttft.png")]
        return stress.main([*ours, *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
