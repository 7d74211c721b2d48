"""What the server itself costs: processor time of HTTP parent and engine child beside a model that costs nothing.

    this process: N raw streaming clients ──HTTP──▶ parent ──pipe──▶ child: scheduler + a runner that sleeps STEP_S

The runner sleeps, so all processor time of both processes is overhead. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics

from kvpilot_engine.server.app import create_app
from kvpilot_engine.server.lifecycle import serve
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.server.testing import make_byte_text
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import FakeModelLoader
from kvpilot_tools.repository import BUILD

STEP_S = 0.04
"""About what 32 streams of the small model cost on two cores."""
TOKENS = 150
ROUNDS = 5
START_LIMIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians over the rounds."""

    streams: int
    parent_us_per_token: float
    child_us_per_token: float
    parent_share_of_step: float
    """Processor time of the parent in one step of all streams ÷ STEP_S."""
    child_share_of_step: float


def run_server(port: int, num_streams: int) -> int:
    """The server under test, in a process of its own."""
    disable_created_metrics()  # type: ignore[no-untyped-call]

    async def run() -> int:
        loader = FakeModelLoader(
            step_s=STEP_S, max_model_len=512, max_num_seqs=num_streams, block_size=256, max_num_batched_tokens=512
        )
        engine = AsyncEngine(loader, ServiceSettings(max_num_seqs=num_streams))
        settings = ServerSettings(served_names=("fake",), host="127.0.0.1", port=port, drain_grace_s=0.0)
        app = create_app(engine, settings, CollectorRegistry())
        return await serve(engine, app, load_text=make_byte_text, termination_log=None)

    return asyncio.run(run())


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def stream_once(port: int) -> int:
    """Number of tokens that one streamed chat brought; 0 when it was refused. Raw: the client is to cost little."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "@"}], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    received = bytearray()
    while b"[DONE]" not in received[-64:] and (chunk := await reader.read(65536)):
        received += chunk
    writer.close()
    return max(0, received.count(b'"content":"') - 1)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def wait_ready(port: int) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            try:
                if await stream_once(port):
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)


async def measure(port: int, parent: int, num_streams: int) -> Overhead:
    await wait_ready(port)
    children = children_of(parent)
    await asyncio.gather(*(stream_once(port) for _ in range(2)))
    parent_us: list[float] = []
    child_us: list[float] = []
    for _ in range(ROUNDS):
        before = cpu_seconds([parent]), cpu_seconds(children)
        num_tokens = sum(await asyncio.gather(*(stream_once(port) for _ in range(num_streams))))
        parent_us.append(1e6 * (cpu_seconds([parent]) - before[0]) / num_tokens)
        child_us.append(1e6 * (cpu_seconds(children) - before[1]) / num_tokens)
    per_step = num_streams / 1e6 / STEP_S
    return Overhead(
        streams=num_streams,
        parent_us_per_token=round(statistics.median(parent_us), 1),
        child_us_per_token=round(statistics.median(child_us), 1),
        parent_share_of_step=round(statistics.median(parent_us) * per_step, 4),
        child_share_of_step=round(statistics.median(child_us) * per_step, 4),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="processor time of the server per streamed token")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--serve", type=int, default=0, help="run the server under test on this port (used by itself)")
    options = parser.parse_args()
    if options.serve:
        return run_server(options.serve, options.streams)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    log = BUILD / "bench" / "server-overhead.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "kvpilot_tools.bench.server_overhead", "--serve", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--streams", str(options.streams)], stdout=output, stderr=output)
        try:
            overhead = asyncio.run(measure(port, process.pid, options.streams))
        finally:
            process.terminate()
            process.wait(timeout=30)
    (BUILD / "bench" / "server-overhead.json").write_text(json.dumps(asdict(overhead)) + "\n")
    print(
        f"server overhead at {overhead.streams} streams: parent {overhead.parent_us_per_token} µs, "
        f"child {overhead.child_us_per_token} µs a token; "
        f"{overhead.parent_share_of_step:.1%} and {overhead.child_share_of_step:.1%} of a step of {STEP_S * 1000:g} ms"
    )
    print(json.dumps({"bench": "server-overhead", **asdict(overhead)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
