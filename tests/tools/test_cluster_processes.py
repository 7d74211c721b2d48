"""Daemons: started detached, recognised by pid and start time, stopped for sure."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpilot_tools.cluster import processes
from kvpilot_tools.cluster.cleanup import is_component, stray_processes
from kvpilot_tools.cluster.errors import StartError
from kvpilot_tools.cluster.processes import Daemon, ProcessIdentity, identify, is_alive


def daemon(tmp_path: Path, *argv: str) -> Daemon:
    return Daemon(name="sleeper", argv=argv, log=tmp_path / "sleeper.log", pidfile=tmp_path / "sleeper.json")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ignore(text: str) -> None:
    del text


def test_a_stat_line_is_read_behind_a_name_with_spaces_and_brackets() -> None:
    rest = " ".join(["S", *["0"] * 18, "4711", "0"])
    assert processes.parse_stat(f"12 (a ) (b)) {rest}") == ("S", 4711)


def test_a_daemon_is_detached_logged_and_noted(tmp_path: Path) -> None:
    started = daemon(tmp_path, "sh", "-c", "echo hello; pwd; exec sleep 60")
    process = started.start(os.environ)
    try:
        assert started.process() == process
        assert os.getsid(process.pid) == process.pid
        wait_until(lambda: started.log.read_text() == "hello\n/\n")
        assert processes.noted_processes(tmp_path) == [process]
    finally:
        assert processes.stop([process], grace_s=0) == []
    assert started.process() is None


def test_proxies_of_the_shell_do_not_reach_a_daemon(tmp_path: Path) -> None:
    started = daemon(tmp_path, "sh", "-c", "env; echo end; exec sleep 60")
    process = started.start({"HTTPS_PROXY": "http://proxy.invalid", "HOME": "/tmp"})
    try:
        wait_until(lambda: "end\n" in started.log.read_text())
        assert "HOME=/tmp\n" in started.log.read_text()
        assert "PROXY" not in started.log.read_text()
    finally:
        processes.stop([process], grace_s=0)


def test_a_pid_that_was_given_out_again_is_not_ours() -> None:
    """A pid file that survived a crash may name a stranger's process: it must not be signalled."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        real = identify(stranger.pid)
        assert real is not None
        noted = ProcessIdentity(real.pid, real.start_ticks - 1)
        assert not is_alive(noted)
        assert processes.stop([noted], grace_s=0.1) == []
        assert stranger.poll() is None
        stranger.kill()


def test_one_that_ignores_the_polite_signal_is_killed(tmp_path: Path) -> None:
    stubborn = daemon(tmp_path, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    process = stubborn.start(os.environ)
    wait_until(lambda: "ready" in stubborn.log.read_text())
    assert processes.stop([process], grace_s=0.2) == []
    assert not is_alive(process)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "start_ticks": 1}'])
def test_a_pid_file_that_was_cut_off_names_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    assert processes.read_pidfile(tmp_path / "x.json") is None
    assert processes.noted_processes(tmp_path) == []


def test_waiting_ends_with_the_log_when_the_daemon_has_ended(tmp_path: Path) -> None:
    failing = daemon(tmp_path, "sh", "-c", "echo the port is taken; exec sleep 0.3")
    failing.start(os.environ)
    with pytest.raises(StartError, match=r"(?s)sleeper ended while it was starting.*the port is taken"):
        failing.wait_ready(lambda: False, limit_s=30, beat=ignore)


def test_a_stray_daemon_is_known_by_the_folder_in_its_command_line(tmp_path: Path) -> None:
    root = tmp_path / "one"
    assert is_component(["/x/bin/kubelet", f"--config={root}/config/kubelet.yaml"], root)
    assert is_component(["/usr/bin/containerd-shim-runc-v2", "-address", f"{root}/containerd/containerd.sock"], root)
    assert not is_component(["/x/bin/kubelet", f"--config={root}-two/config/kubelet.yaml"], root)
    assert not is_component(["/usr/bin/less", f"{root}/logs/kubelet.log"], root)
    assert not is_component([""], root)


def test_only_processes_of_that_folder_are_strays(tmp_path: Path) -> None:
    assert stray_processes(tmp_path) == []
