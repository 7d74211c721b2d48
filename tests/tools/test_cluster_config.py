"""Rendered configuration: the lines without which a node does not work here, or leaves things behind."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import tomllib
from pathlib import Path

import pytest

from kvpilot_tools.cluster import node, node_config, pause_image
from kvpilot_tools.cluster.assets import ALL_ASSETS
from kvpilot_tools.cluster.control_plane import ControlPlane
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.record import ClusterRecord, choose_ports

LAYOUT = ClusterLayout(name="test", root=Path("/state/test"), image_store=Path("/cache/containerd"))


def plane(*, has_node: bool, has_controllers: bool = True) -> ControlPlane:
    record = ClusterRecord(
        ports=choose_ports(),
        has_node=has_node,
        has_controllers=has_controllers,
        node_ip="192.0.2.2" if has_node else "127.0.0.1",
    )
    return ControlPlane(LAYOUT, record, {asset.name: Path("/bin") / asset.name for asset in ALL_ASSETS})


def test_containerd_works_in_its_own_folders_only() -> None:
    config = tomllib.loads(node_config.render_containerd(LAYOUT, Path("/usr/lib/cni")))
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"]
    assert cri["sandbox_image"] == pause_image.REFERENCE
    assert cri["containerd"]["runtimes"]["runc"]["options"]["Root"].startswith("/state/test/")
    assert config["state"].startswith("/state/test/")
    assert config["grpc"]["address"].startswith("/state/test/")
    # A socket's path has 107 characters at most, and containerd puts `.ttrpc` behind this one.
    longest = dataclasses.replace(LAYOUT, root=Path("/var/lib/kvpilot/cluster") / ("x" * 32))
    assert len(f"{longest.containerd_socket}.ttrpc") < 108


def test_the_kubelet_keeps_what_it_makes_in_our_folder_and_control_group() -> None:
    config = node_config.build_kubelet_config(LAYOUT, 1, 2)
    assert config["cgroupRoot"] == "/kvpilot-test"
    assert config["podLogsDir"].startswith("/state/test/")
    assert config["volumePluginDir"].startswith("/state/test/")
    assert config["makeIPTablesUtilChains"] is False
    assert config["imageGCHighThresholdPercent"] == 100


def test_every_daemon_can_be_recognised_by_its_command_line() -> None:
    daemons = plane(has_node=True).daemons()
    assert [daemon.name for daemon in daemons] == [
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
    ]
    daemons += [node.Node(plane(has_node=True)).kubelet(), node.Node(plane(has_node=True)).proxy()]
    for daemon in daemons:
        assert any("/state/test/" in argument for argument in daemon.argv[1:]), daemon.name


@pytest.mark.parametrize(("has_node", "address"), [(True, "0.0.0.0"), (False, "127.0.0.1")])
def test_the_api_server_listens_for_pods_only_when_there_is_a_node(has_node: bool, address: str) -> None:
    assert f"--bind-address={address}" in plane(has_node=has_node).api_server().argv


def test_without_controllers_a_pod_needs_no_service_account() -> None:
    assert (
        "--disable-admission-plugins=ServiceAccount" in plane(has_node=False, has_controllers=False).api_server().argv
    )
    assert "--disable-admission-plugins=ServiceAccount" not in plane(has_node=False).api_server().argv


def test_the_pause_image_is_the_binary_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "pause").write_bytes(b"\x7fELF")
    archives = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for archive in archives:
        pause_image.write_archive(tmp_path / "pause", archive)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as image:
        read = {name: image.extractfile(name) for name in image.getnames()}
        manifest_file, layer_file = read["manifest.json"], read["layer.tar"]
        assert manifest_file is not None
        assert layer_file is not None
        manifest = json.load(manifest_file)
        assert manifest[0]["RepoTags"] == [pause_image.REFERENCE]
        with tarfile.open(fileobj=io.BytesIO(layer_file.read())) as layer:
            assert [(entry.name, entry.mode) for entry in layer] == [("pause", 0o755)]
