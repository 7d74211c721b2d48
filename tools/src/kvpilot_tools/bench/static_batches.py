"""transformers as a measured peer: its worker process, asked for the batches that our server gets as streams."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpilot_tools.bench import transformers_worker
from kvpilot_tools.bench.cases import Case
from kvpilot_tools.bench.peer_layout import PeerLayout

DTYPES = ("float32", "bfloat16")
"""Which of them is faster depends on the batch; the better one counts."""
_CASES = ("single", "mixed_8", "mixed_32")


@dataclass(slots=True)
class StaticBatches:
    process: subprocess.Popen[str]
    log: Path
    startup_s: float = 0.0

    def handles(self, case: Case) -> bool:
        return case.name in _CASES

    def measure(self, case: Case, prompts: Sequence[Sequence[int]]) -> Mapping[str, float]:
        """Useful tokens of the case per second with each dtype, and the better one as throughput."""
        size = case.concurrency
        outputs = [case.output_tokens[i % len(case.output_tokens)] for i in range(size)]
        rates: dict[str, float] = {}
        for dtype in DTYPES:
            answer = self._ask({"prompts": [list(p) for p in prompts[:size]], "outputs": outputs, "dtype": dtype})
            rates[dtype] = sum(outputs) / float(answer["seconds"])
        return {"throughput_tps": max(rates.values()), **{f"throughput_{k}_tps": rate for k, rate in rates.items()}}

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _ask(self, question: Mapping[str, object]) -> Any:
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None  # noqa: S101 - a pipe was asked for
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"transformers' process ended; its log is {self.log}\n{tail}")
        return json.loads(line)


@contextlib.contextmanager
def start_static_batches(layout: PeerLayout, model: Path, *, num_threads: int, log: Path) -> Iterator[StaticBatches]:
    """Run the worker until the block ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    python = str(layout.python(layout.transformers))
    argv = [python, str(Path(transformers_worker.__file__)), str(layout.hf_folder(model)), str(num_threads)]
    with log.open("w") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            argv,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        worker = StaticBatches(process, log)
        try:
            worker.read()
            worker.startup_s = time.perf_counter() - began
            yield worker
        finally:
            worker.resume()
            process.kill()
            process.wait()
