"""Paths, records, kubeconfigs, mounts and control groups: what is decided from text and files alone."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest
import yaml

from kvpilot_tools.cluster import cgroups, mounts
from kvpilot_tools.cluster.certificates import CertificateAuthority
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.kubeconfig import build_kubeconfig, chosen_cluster, write_chosen, write_kubeconfig
from kvpilot_tools.cluster.layout import cache_home, layout_for, state_home
from kvpilot_tools.cluster.processes import ProcessIdentity
from kvpilot_tools.cluster.record import ClusterRecord, choose_ports, load_record


def test_state_of_root_is_the_machines_and_of_others_their_own() -> None:
    assert state_home({}, is_root=True) == Path("/var/lib/kvpilot/cluster")
    assert state_home({"XDG_STATE_HOME": "/s"}, is_root=False) == Path("/s/kvpilot/cluster")
    assert cache_home({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvpilot")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", "-a", "a-", "a" * 33])
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(RequirementError, match="cluster name"):
        layout_for(name)


def test_a_record_survives_being_written(tmp_path: Path) -> None:
    record = ClusterRecord(
        ports=choose_ports(),
        has_node=True,
        has_controllers=True,
        node_ip="192.0.2.2",
        gpus=4,
        owner=ProcessIdentity(1, 2),
        machine_before={"kernel/panic": "1"},
        tables_before={"iptables": ["nat"]},
        had_kubelet_folder=False,
    )
    record.save(tmp_path / "cluster.json")
    assert load_record(tmp_path / "cluster.json") == record


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"ports": {}}'])
def test_a_record_that_can_not_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "cluster.json").write_text(content)
    assert load_record(tmp_path / "cluster.json") is None


def test_ports_are_different_and_outside_the_ranges_of_others() -> None:
    ports = dataclasses.astuple(choose_ports())
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 30000 for port in ports)


def test_a_kubeconfig_holds_everything_and_is_private(tmp_path: Path) -> None:
    authority = CertificateAuthority("test")
    config = build_kubeconfig("https://127.0.0.1:1", authority.certificate, "me", authority.issue("me"))
    write_kubeconfig(tmp_path / "kubeconfig", config)
    assert stat.S_IMODE((tmp_path / "kubeconfig").stat().st_mode) == 0o600
    read = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    assert read["current-context"] == read["contexts"][0]["name"] == "kvpilot-local"
    assert set(read["users"][0]["user"]) == {"client-certificate-data", "client-key-data"}


@pytest.fixture
def two_contexts(tmp_path: Path) -> Path:
    file = tmp_path / "theirs"
    file.write_text(yaml.safe_dump({"contexts": [{"name": "prod"}, {"name": "lab"}], "current-context": "prod"}))
    return file


def test_a_named_file_counts_only_with_a_named_context(two_contexts: Path, tmp_path: Path) -> None:
    assert chosen_cluster({}) is None
    with pytest.raises(RequirementError, match=r"KVPILOT_CONTEXT must name the context.*prod, lab"):
        chosen_cluster({"KVPILOT_KUBECONFIG": str(two_contexts)})
    with pytest.raises(RequirementError, match=r"'stage' is not in"):
        chosen_cluster({"KVPILOT_KUBECONFIG": str(two_contexts), "KVPILOT_CONTEXT": "stage"})
    with pytest.raises(RequirementError, match="KVPILOT_KUBECONFIG is not"):
        chosen_cluster({"KVPILOT_CONTEXT": "lab"})
    with pytest.raises(RequirementError, match="can't be read"):
        chosen_cluster({"KVPILOT_KUBECONFIG": str(tmp_path / "none"), "KVPILOT_CONTEXT": "lab"})


def test_the_chosen_context_is_current_in_the_copy_and_the_original_is_not_touched(
    two_contexts: Path, tmp_path: Path
) -> None:
    chosen = chosen_cluster({"KVPILOT_KUBECONFIG": str(two_contexts), "KVPILOT_CONTEXT": "lab"})
    assert chosen is not None
    write_chosen(chosen, tmp_path / "copy")
    assert yaml.safe_load((tmp_path / "copy").read_text())["current-context"] == "lab"
    assert yaml.safe_load(two_contexts.read_text())["current-context"] == "prod"


def test_mounts_below_a_folder_come_innermost_first_and_with_real_names() -> None:
    text = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:1 / /s/one rw - ext4 /dev/a rw\n"
        "3 2 8:1 / /s/one/with\\040space rw - tmpfs t rw\n"
        "4 1 8:1 / /s/one-more rw - ext4 /dev/a rw\n"
    )
    assert mounts.mounts_below(Path("/s/one"), text) == [Path("/s/one/with space"), Path("/s/one")]


@pytest.mark.parametrize("trees", [["memory", "pids"], []])
def test_a_control_group_is_made_and_removed_in_every_tree(tmp_path: Path, trees: list[str]) -> None:
    """The first parameter is cgroup v1, one folder per controller; the second is v2."""
    for tree in trees:
        (tmp_path / tree).mkdir()
    if not trees:
        (tmp_path / "cgroup.controllers").touch()
    cgroups.make_group("kvpilot-x", tmp_path)
    places = [tmp_path / tree / "kvpilot-x" for tree in trees] or [tmp_path / "kvpilot-x"]
    for place in places:
        (place / "kubepods" / "pod1").mkdir(parents=True)
    neighbour = places[0].parent / "kvpilot-y"
    neighbour.mkdir()

    cgroups.remove_group("kvpilot-x", tmp_path)
    assert not [place for place in places if place.exists()]
    assert neighbour.exists()
