"""The API server without a node: real, several at once, and gone when its owner is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_tools.cluster.api_server import api_server, sweep_orphans
from kvpilot_tools.cluster.processes import is_alive, noted_processes

pytestmark = pytest.mark.apiserver


def kubectl(binary: Path, kubeconfig: Path, *arguments: str) -> str:
    command = [str(binary), "--kubeconfig", str(kubeconfig), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_two_run_at_once_and_know_nothing_of_each_other() -> None:
    with api_server() as one, api_server() as two:
        assert one.kubeconfig != two.kubeconfig
        kubectl(one.kubectl, one.kubeconfig, "create", "namespace", "only-here")
        assert "only-here" in kubectl(one.kubectl, one.kubeconfig, "get", "namespaces")
        assert "only-here" not in kubectl(two.kubectl, two.kubeconfig, "get", "namespaces")
        folders = [one.kubeconfig.parent, two.kubeconfig.parent]
        processes = [process for folder in folders for process in noted_processes(folder / "pids")]
        assert len(processes) == 4
    assert not [process for process in processes if is_alive(process)]
    assert not [folder for folder in folders if folder.exists()]


def test_the_server_of_a_killed_process_is_swept_by_the_next_one() -> None:
    code = (
        "import json, os, signal\n"
        "from kvpilot_tools.cluster.api_server import api_server\n"
        "with api_server() as server:\n"
        "    print(json.dumps(str(server.kubeconfig)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(json.loads(done.stdout)).parent
    processes = noted_processes(folder / "pids")
    assert processes

    sweep_orphans(os.environ)
    assert not [process for process in processes if is_alive(process)]
    assert not folder.exists()
