"""The local cluster itself: up, up again, up after a crash, down. Uses a cluster of its own, under another name.

The machine has room for one node, so these tests run before those that share a cluster, and not at all while somebody
else's is up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpilot_tools.cluster import cgroups, mounts, network, node_images, pause_image
from kvpilot_tools.cluster import local_cluster as clusters
from kvpilot_tools.cluster.cleanup import stray_processes
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.kubeconfig import FILE_VARIABLE
from kvpilot_tools.cluster.layout import ClusterLayout, layout_for
from kvpilot_tools.cluster.local_cluster import UpResult
from kvpilot_tools.cluster.processes import ProcessIdentity, is_alive, noted_processes
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OUTSIDE = (
    Path("/run/containerd"),
    Path("/var/lib/cni"),
    Path("/var/lib/kubelet"),
    Path("/var/log/containers"),
    Path("/opt/cni"),
    Path("/opt/containerd"),
)


@dataclass(frozen=True)
class Machine:
    """What a cluster could leave behind on a machine."""

    rules: tuple[str, ...]
    links: frozenset[str]
    mounts: tuple[str, ...]
    settings: dict[str, str]
    groups: frozenset[str]
    folders: frozenset[Path]


def look_at_machine() -> Machine:
    return Machine(
        rules=tuple(
            line
            for family in network.FAMILIES
            for line in network.save_rules(family).splitlines()
            if line.startswith(("*", ":", "-")) and not line.startswith("#")
        ),
        links=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
        mounts=tuple(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        settings=network.read_settings(),
        groups=frozenset(path.name for path in cgroups.CGROUPS.glob("*/kvpilot-*")),
        folders=frozenset(path for path in OUTSIDE if path.exists()),
    )


def without_counters(machine: Machine) -> Machine:
    """Rules without the packet counters that a saved chain shows."""
    rules = tuple(rule.split(" [")[0] for rule in machine.rules)
    return Machine(rules, machine.links, machine.mounts, machine.settings, machine.groups, machine.folders)


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterLayout]:
    """Name a cluster for these tests, with an image store of its own, and take it away whatever happens."""
    if os.environ.get(FILE_VARIABLE):
        pytest.skip("these tests are about clusters of our own making")
    own = dataclasses.replace(layout_for("lifecycle"), image_store=tmp_path_factory.mktemp("store"))
    for other in own.root.parent.glob("*/"):
        if other.name != own.name and noted_processes(other / "pids") and (other / "containerd").exists():
            reason = f"the cluster {other.name!r} has this machine's node: `kvpilot-cluster down --name {other.name}`"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    yield own
    clusters.down(own, Progress())


@pytest.fixture(scope="module")
def before(layout: ClusterLayout) -> Machine:
    """Return the machine as it is without the cluster."""
    clusters.down(layout, Progress())
    return without_counters(look_at_machine())


@pytest.fixture
def up(layout: ClusterLayout, before: Machine) -> Callable[[], UpResult]:
    """Return what `kvpilot-cluster up` calls."""

    def call() -> UpResult:
        return clusters.up(layout, gpus=4, environment=None, environ=os.environ, progress=Progress())

    return call


def pause_pod(name: str, **limits: str) -> dict[str, Any]:
    container = {
        "name": "pause",
        "image": pause_image.REFERENCE,
        "imagePullPolicy": "Never",
        "resources": {"limits": limits},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}


def run_pod(client: Kubectl, name: str) -> None:
    client.apply(pause_pod(name))
    wait_until(lambda: phase(client, name) == "Running", f"pod {name} to run")


def phase(client: Kubectl, name: str) -> str:
    pod = client.get("pod", name)
    return "" if pod is None else str(pod["status"]["phase"])


def everything(layout: ClusterLayout) -> list[ProcessIdentity]:
    pods = cgroups.processes_in(cgroups.group_name(layout.name))
    return [*noted_processes(layout.pids), *stray_processes(layout.root), *pods]


def test_up_twice_is_one_cluster(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    first = noted_processes(layout.pids)
    again = up()
    assert again.was_running
    assert noted_processes(layout.pids) == first


def test_the_node_runs_pods_and_has_as_many_gpus_as_it_was_told(
    layout: ClusterLayout, up: Callable[[], UpResult]
) -> None:
    up()
    client = Kubectl.for_kubeconfig(layout.kubeconfig)
    client.apply(pause_pod("four", **{"nvidia.com/gpu": "4"}))
    wait_until(lambda: phase(client, "four") == "Running", "a pod with all GPUs to run")
    client.apply(pause_pod("one-more", **{"nvidia.com/gpu": "1"}))
    wait_until(lambda: "Insufficient nvidia.com/gpu" in json.dumps(client.get("pod", "one-more")), "a refusal")
    client.run("delete", "pod", "four", "one-more", "--now")


def test_the_api_is_reachable_at_its_service_address(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    trust = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
    with urllib.request.urlopen("https://10.96.0.1/readyz", context=trust, timeout=10) as answer:
        assert answer.read() == b"ok"


def test_a_second_node_is_refused_by_the_name_of_the_first(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    second = layout_for("second")
    with pytest.raises(RequirementError, match="'lifecycle' has this machine's node"):
        clusters.up(second, gpus=0, environment=None, environ=os.environ, progress=Progress())
    assert not second.root.exists()


def test_up_recovers_when_every_daemon_was_killed(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    run_pod(Kubectl.for_kubeconfig(layout.kubeconfig), "survivor")
    orphans = cgroups.processes_in(cgroups.group_name(layout.name))
    assert orphans
    for process in [*noted_processes(layout.pids), *stray_processes(layout.root)]:
        os.kill(process.pid, signal.SIGKILL)
    assert mounts.mounts_below(layout.root, Path("/proc/self/mountinfo").read_text())

    assert not up().was_running
    assert not [process for process in orphans if is_alive(process)]
    client = Kubectl.for_kubeconfig(layout.kubeconfig)
    assert client.get("pod", "survivor") is None
    run_pod(client, "afterwards")


def test_up_recovers_when_an_up_was_killed_half_way(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    clusters.down(layout, Progress())
    command = [sys.executable, "-m", "kvpilot_tools.cluster", "up", "--name", layout.name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as half:
        wait_until((layout.pids / "kube-apiserver.json").exists, "the API server to be started")
        half.kill()
    started = noted_processes(layout.pids)
    assert started

    assert not up().was_running
    assert not [process for process in started if is_alive(process)]


def test_a_daemon_without_a_pid_file_is_found(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    (layout.pids / "kubelet.json").unlink()
    (layout.pids / "etcd.json").unlink()
    processes = everything(layout)
    clusters.down(layout, Progress())
    assert not [process for process in processes if is_alive(process)]


def test_down_leaves_nothing(layout: ClusterLayout, up: Callable[[], UpResult], before: Machine) -> None:
    up()
    run_pod(Kubectl.for_kubeconfig(layout.kubeconfig), "still-running")
    processes = everything(layout)
    assert len(processes) > 8
    assert network.BRIDGE in look_at_machine().links

    clusters.down(layout, Progress())
    assert not [process for process in processes if is_alive(process)]
    assert not layout.root.exists()
    assert without_counters(look_at_machine()) == before
    clusters.down(layout, Progress())


def test_up_survives_a_damaged_image_store(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    """The store outlives clusters, so one that can't be read would otherwise stop every later one."""
    clusters.down(layout, Progress())
    database = layout.image_store / "io.containerd.metadata.v1.bolt" / "meta.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    database.write_bytes(b"not a database" * 1000)
    up()
    run_pod(Kubectl.for_kubeconfig(layout.kubeconfig), "on-a-new-store")


def test_images_outlive_a_cluster_and_its_containers_do_not(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    up()
    client = Kubectl.for_kubeconfig(layout.kubeconfig)
    run_pod(client, "of-the-first")
    clusters.down(layout, Progress())
    up()
    assert pause_image.REFERENCE in node_images.image_names(layout)
    assert not node_images.forget_containers(layout)


def test_down_leaves_other_rules_alone(layout: ClusterLayout, up: Callable[[], UpResult]) -> None:
    """Somebody's own rules, made while the cluster was up, stay."""
    up()
    rule = ["FORWARD", "-s", "192.0.2.77/32", "-m", "comment", "--comment", "kvpilot test", "-j", "ACCEPT"]
    subprocess.run(["iptables", "-A", *rule], check=True)
    try:
        clusters.down(layout, Progress())
        subprocess.run(["iptables", "-C", *rule], check=True)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["iptables", "-D", *rule], check=True)
