"""What is said where a node can't run: what is missing, and what to do instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_tools.cluster import engine_env, images, pip_settings
from kvpilot_tools.cluster.cli import main
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.requirements import INSTEAD, describe_obstacles, effective_capabilities

ALL_CAPABILITIES = (1 << 41) - 1


def test_a_capable_machine_has_no_obstacle() -> None:
    assert describe_obstacles(is_root=True, capabilities=ALL_CAPABILITIES, has_memory_cgroup=True) == []


def test_every_obstacle_is_named_at_once() -> None:
    found = describe_obstacles(is_root=True, capabilities=0, has_memory_cgroup=False)
    assert [word for text in found for word in ("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "memory cgroup") if word in text] == [
        "CAP_SYS_ADMIN",
        "CAP_NET_ADMIN",
        "memory cgroup",
    ]


def test_without_root_the_capabilities_are_not_spoken_of() -> None:
    assert describe_obstacles(is_root=False, capabilities=0, has_memory_cgroup=True) == [
        "you are not root (a node mounts file systems and changes the network)"
    ]
    assert "KVPILOT_KUBECONFIG" in INSTEAD
    assert "KVPILOT_CONTEXT" in INSTEAD


def test_capabilities_are_read_from_the_status_of_a_process() -> None:
    assert effective_capabilities("Name:\tx\nCapPrm:\t0\nCapEff:\t0000000000201000\n") == 1 << 21 | 1 << 12
    assert effective_capabilities("") == 0


def test_the_command_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubeconfig", "--name", "no-such-cluster"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == ("kvpilot-cluster: the cluster 'no-such-cluster' is not up; `kvpilot-cluster up` starts it\n")


def test_down_of_nothing_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--name", "no-such-cluster"]) == 0
    assert "there was nothing" in capsys.readouterr().out


def test_a_half_named_cluster_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPILOT_CONTEXT", "prod")
    assert main(["up", "--name", "no-such-cluster"]) == 1
    assert "KVPILOT_KUBECONFIG is not" in capsys.readouterr().err


def test_building_binaries_needs_nothing_but_the_standard_library() -> None:
    """`build` runs before any environment exists, so it may import no third-party package."""
    source = str(Path(engine_env.__file__).parents[2])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kvpilot_tools.cluster.cli import build_parser\n"
        "build_parser().parse_args(['build'])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_environment_of_another_python_is_refused_for_engine_pods(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    answer = {"version": [3, 13], "site-packages": "/x", "engine": None, "models": None}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    with pytest.raises(RequirementError, match=r"has Python 3\.13; engine pods run the base image's 3\.11"):
        engine_env.find_targets(tmp_path)


def test_pip_settings_are_merged_as_pip_does_it_and_its_folders_found(tmp_path: Path) -> None:
    printed = (
        f":env:.find-links='{tmp_path} https://elsewhere.invalid/x'\n"
        "global.index-url='https://one.invalid/simple'\n"
        ":env:.index-url='https://two.invalid/simple'\n"
        "install.no-binary='x'\n"
    )
    settings = pip_settings.parse(printed)
    assert settings["global"]["index-url"] == "https://two.invalid/simple"
    assert pip_settings.local_folders(settings) == [tmp_path]
    assert pip_settings.certificate(settings) is None
    assert pip_settings.certificate(pip_settings.parse(":env:.cert='/x/ca.pem'\n")) == Path("/x/ca.pem")
    assert "[install]\nno-binary = x\n" in pip_settings.render(settings)


def test_a_build_sees_the_machines_authorities_only_when_it_has_some_of_its_own(tmp_path: Path) -> None:
    assert images.private_authorities(None, own=tmp_path) == []
    named = tmp_path / "named.pem"
    named.touch()
    assert named in images.private_authorities(named, own=tmp_path)
    (tmp_path / "company.crt").touch()
    assert named not in images.private_authorities(None, own=tmp_path)
    assert images.private_authorities(None, own=tmp_path) == [
        folder for folder in [Path("/etc/ssl/certs")] if folder.is_dir()
    ]
