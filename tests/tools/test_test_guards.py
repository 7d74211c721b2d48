"""The guards of the test run itself: what can't run is skipped visibly, and fails where CI is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NEEDS_AN_API_SERVER = Path(__file__).with_name("test_api_server.py")


def run_without_binaries(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a test that needs the API server where there is no binary to be found."""
    dropped = ("CI", "KVPILOT_ASSETS", "KVPILOT_KUBECONFIG", "KVPILOT_CONTEXT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    env = {**kept, "XDG_CACHE_HOME": str(tmp_path), "PATH": "/nonexistent", **more}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(NEEDS_AN_API_SERVER)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


def test_what_can_not_run_is_skipped_and_says_why(tmp_path: Path) -> None:
    done = run_without_binaries(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 skipped" in done.stdout
    assert "not built: etcd, kube-apiserver" in done.stdout


def test_where_ci_is_set_it_fails(tmp_path: Path) -> None:
    done = run_without_binaries(tmp_path, CI="true")
    assert done.returncode == 1
    assert "CI is set, so this must be able to run: not built: etcd" in done.stdout


def test_a_file_without_a_context_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "theirs"
    file.write_text("contexts: [{name: prod}]\ncurrent-context: prod\n")
    done = run_without_binaries(tmp_path, KVPILOT_KUBECONFIG=str(file))
    assert done.returncode == 4
    assert "KVPILOT_CONTEXT must name the context to use (one of: prod)" in done.stderr
