"""Daemons that outlive the command that started them: start, recognise, stop.

A pid alone names nothing, since the kernel gives it out again: a daemon is a pid *and* its start time. Invariant: no
signal goes to a process whose start time differs from the one that was noted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.errors import StartError

PROC = Path("/proc")
LOG_TAIL_LINES = 15
POLL_S = 0.05

# Proxies are for pulling images (containerd); a component of the control plane that used one could not reach its
# neighbours.
_DAEMON_ENVIRONMENT = ("HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int


def parse_stat(text: str) -> tuple[str, int]:
    """Return state letter and start time from /proc/PID/stat; the name in it may hold spaces and brackets."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _read_stat(pid: int) -> tuple[str, int] | None:
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text())
    except (OSError, IndexError, ValueError):
        return None


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a live process; None when there is none, or only its zombie."""
    stat = _read_stat(pid)
    return None if stat is None or stat[0] in "ZX" else ProcessIdentity(pid, stat[1])


def is_alive(process: ProcessIdentity) -> bool:
    """Tell whether exactly this process runs; buries it if it is a dead child of ours."""
    stat = _read_stat(process.pid)
    if stat is None or stat[1] != process.start_ticks:
        return False
    if stat[0] not in "ZX":
        return True
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return False


def signal_process(process: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to exactly this process, if it still runs."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def wait_gone(processes: Iterable[ProcessIdentity], limit_s: float) -> list[ProcessIdentity]:
    """Wait until all have ended; return those that have not."""
    deadline = time.monotonic() + limit_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if is_alive(process)]
    return left


def stop(processes: Iterable[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
    """Ask, wait `grace_s`, then kill; return what survived even that."""
    wanted = list(processes)
    if grace_s > 0:
        for process in wanted:
            signal_process(process, signal.SIGTERM)
        wanted = wait_gone(wanted, grace_s)
    for process in wanted:
        signal_process(process, signal.SIGKILL)
    return wait_gone(wanted, 10.0)


def write_pidfile(file: Path, process: ProcessIdentity) -> None:
    """Note a daemon, so that a later command finds it."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": process.pid, "start_ticks": process.start_ticks}))
    partial.replace(file)


def read_pidfile(file: Path) -> ProcessIdentity | None:
    """Return the noted identity, dead or alive; None when the file is missing or was cut off."""
    try:
        data = json.loads(file.read_text())
        return ProcessIdentity(int(data["pid"]), int(data["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Daemon:
    """One component: its name, its command line, and where its log and pid file lie."""

    name: str
    argv: tuple[str, ...]
    log: Path
    pidfile: Path

    def start(self, environ: Mapping[str, str]) -> ProcessIdentity:
        """Start it in a session of its own, detached from our terminal and working folder."""
        env = {name: environ[name] for name in _DAEMON_ENVIRONMENT if name in environ} | {"PATH": _PATH}
        # `env --chdir` becomes the daemon (same pid), so no working folder of ours is kept busy. posix_spawn, not
        # Popen: the daemon is meant to outlive us, which Popen calls a leak.
        argv = ["env", "--chdir=/", "--", *self.argv]
        pid = os.posix_spawnp(
            "env",
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        process = identify(pid)
        if process is None:
            raise StartError(f"{self.name} ended at once\n{self.log_tail()}")
        write_pidfile(self.pidfile, process)
        return process

    def process(self) -> ProcessIdentity | None:
        """Return the running process; None when it is not running."""
        noted = read_pidfile(self.pidfile)
        return noted if noted is not None and is_alive(noted) else None

    def log_tail(self) -> str:
        """Return the end of the log, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join([f"(log: {self.log})", *lines[-LOG_TAIL_LINES:]])

    def wait_ready(self, is_ready: Callable[[], bool], *, limit_s: float, beat: Callable[[str], None]) -> None:
        """Wait until `is_ready`; raises StartError as soon as the daemon has ended, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not is_ready():
            if self.process() is None:
                raise StartError(f"{self.name} ended while it was starting\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} was not ready after {limit_s:.0f} s\n{self.log_tail()}")
            beat(f"waiting for {self.name}")
            time.sleep(POLL_S)


def noted_processes(pids: Path) -> list[ProcessIdentity]:
    """Return every live daemon noted in a folder of pid files."""
    noted = (read_pidfile(file) for file in sorted(pids.glob("*.json")))
    return [process for process in noted if process is not None and is_alive(process)]
