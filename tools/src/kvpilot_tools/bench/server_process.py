"""One server as a process of ours: started, waited for, paused while others are measured, weighed, stopped.

Several servers may be alive at once, but only one may run: `pause` stops all processes of one by signal, so that a
benchmark can alternate between servers without starting them again. Invariant: whatever happens, no process is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvpilot_tools.bench.memory_probe import process_tree_bytes
from kvpilot_tools.bench.server_specs import ServerSpec

_POLL_S = 0.05
_STOP_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds used so far."""

    front: float
    """By the first process: HTTP and text, where a server has a process for it."""
    rest: float
    """By all its descendants."""

    @property
    def total(self) -> float:
        return self.front + self.rest

    def since(self, earlier: CpuTimes) -> CpuTimes:
        return CpuTimes(self.front - earlier.front, self.rest - earlier.rest)


@dataclass(slots=True)
class RunningServer:
    spec: ServerSpec
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    startup_s: float = 0.0

    def cpu(self) -> CpuTimes:
        front, rest = 0.0, 0.0
        for member in self._family():
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                if member.pid == self.process.pid:
                    front += times.user + times.system
                else:
                    rest += times.user + times.system
        return CpuTimes(front, rest)

    def memory_bytes(self) -> int:
        """Memory of all its processes, shared pages counted once."""
        return process_tree_bytes(self.process.pid) or 0

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"{self.spec.name} ended with {self.process.returncode}; its log is {self.log}\n{tail}")

    def stop(self) -> None:
        """End all its processes, gently first."""
        family = self._family()
        self.resume()
        self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_STOP_LIMIT_S)
        for member in alive:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self.process.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for member in self._family():
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def start_server(
    spec: ServerSpec, *, log: Path, on_wait: Callable[[str], None] | None = None
) -> Iterator[RunningServer]:
    """Run the server on a free port of loopback until the block ends; raises RuntimeError or TimeoutError."""
    port = str(free_port())
    argv = [part.replace("{port}", port) for part in spec.argv]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            argv,
            env={**os.environ, **spec.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = RunningServer(spec, f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_ready(server, began, on_wait)
            server.startup_s = time.perf_counter() - began
            yield server
        finally:
            server.stop()


def _wait_ready(server: RunningServer, began: float, on_wait: Callable[[str], None] | None) -> None:
    spec = server.spec
    while time.perf_counter() - began < spec.start_limit_s:
        server.require_alive()
        try:
            with urllib.request.urlopen(server.url + spec.ready_path, timeout=5) as response:  # noqa: S310 - loopback
                if response.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        if on_wait is not None:
            on_wait(f"{spec.name}: starting, {time.perf_counter() - began:.0f} s")
        time.sleep(_POLL_S)
    raise TimeoutError(f"{spec.name} was not ready within {spec.start_limit_s:g} s; its log is {server.log}")
