"""Our engine as a real server on loopback, for a benchmark: started, waited for, asked over HTTP, stopped."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def engine_server(model: Path, *flags: str, log: Path) -> Iterator[str]:
    """Run `python -m kvpilot_engine` on a free loopback port; yields its base URL, stops it at the end."""
    port = free_port()
    command = [sys.executable, "-m", "kvpilot_engine", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "bench", *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for /readyz; raises RuntimeError when the process ends first, TimeoutError after START_LIMIT_S."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with {process.returncode}; its log is {log}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:  # noqa: S310 - loopback, our own server
                if response.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"the engine was not ready within {START_LIMIT_S:g} s; its log is {log}")
