"""The whole cluster: up, down, is it well. Ties control plane, node, network and clean-up together.

One cluster with a node at a time on a machine, held by a lock while it is started or stopped. Invariant: `up` either
finds a cluster that is whole and leaves it alone, or removes every trace of the earlier one and starts afresh; there
is no repair.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster import engine_env, mounts, network
from kvpilot_tools.cluster.api_server import START_ATTEMPTS, lost_a_port
from kvpilot_tools.cluster.assets import ALL_ASSETS, AssetStore
from kvpilot_tools.cluster.cleanup import KUBELET_DEFAULT, remove_cluster
from kvpilot_tools.cluster.control_plane import ControlPlane
from kvpilot_tools.cluster.errors import RequirementError, StartError
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.node import Node
from kvpilot_tools.cluster.processes import noted_processes
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.record import ClusterRecord, choose_ports, load_record
from kvpilot_tools.cluster.requirements import check_node

DEFAULT_GPUS = 4


@dataclass(frozen=True, slots=True)
class UpResult:
    """What `up` did."""

    was_running: bool
    control_plane_s: float = 0.0
    node_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What runs of a cluster that exists."""

    record: ClusterRecord
    running: tuple[str, ...]
    stopped: tuple[str, ...]
    is_ready: bool


@contextmanager
def locked(layout: ClusterLayout, progress: Progress) -> Iterator[None]:
    """Hold this user's lock over clusters, so that two commands never work on the same things."""
    home = layout.root.parent
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.line("waiting for another kvpilot-cluster command")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def up(
    layout: ClusterLayout, *, gpus: int, environment: Path | None, environ: Mapping[str, str], progress: Progress
) -> UpResult:
    """Make sure that the cluster with a node runs; `environment` is what engine pods may mount from the machine."""
    check_node(progress)
    binaries = AssetStore.from_environ(environ).ensure(ALL_ASSETS, progress)
    with locked(layout, progress):
        state = inspect(layout, binaries)
        was_running = state is not None and state.is_ready and state.record.has_node
        if state is not None and was_running:
            result = UpResult(was_running=True)
            _renew_gpus(layout, state.record, binaries, gpus)
        else:
            result = _start(layout, binaries, gpus, environ, progress)
        if environment is not None:
            engine_env.link(environment, progress)
    return result


def down(layout: ClusterLayout, progress: Progress, *, purge: bool = False) -> float:
    """Remove the cluster, with `purge` also the images that its node was given; returns the seconds it took."""
    began = progress.elapsed_s
    with locked(layout, progress):
        remove_cluster(layout)
        if purge:
            mounts.remove_tree(layout.image_store)
    return progress.elapsed_s - began


def inspect(layout: ClusterLayout, binaries: Mapping[str, Path]) -> ClusterState | None:
    """Return what runs; None when there is no such cluster."""
    record = load_record(layout.settings_file)
    if record is None:
        return None
    plane = ControlPlane(layout, record, binaries)
    daemons = plane.daemons() + (Node(plane).daemons() if record.has_node else [])
    running = tuple(daemon.name for daemon in daemons if daemon.process() is not None)
    stopped = tuple(daemon.name for daemon in daemons if daemon.name not in running)
    is_ready = not stopped and plane.client().is_ready() and (not record.has_node or Node(plane).is_ready())
    return ClusterState(record, running, stopped, is_ready)


def _renew_gpus(layout: ClusterLayout, record: ClusterRecord, binaries: Mapping[str, Path], gpus: int) -> None:
    if record.gpus != gpus:
        wanted = dataclasses.replace(record, gpus=gpus)
        wanted.save(layout.settings_file)
        Node(ControlPlane(layout, wanted, binaries)).offer_gpus(gpus)


def _start(
    layout: ClusterLayout, binaries: Mapping[str, Path], gpus: int, environ: Mapping[str, str], progress: Progress
) -> UpResult:
    _make_room(layout, progress)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return _start_once(layout, binaries, gpus, environ, progress)
        except StartError as error:
            if attempt == START_ATTEMPTS or not lost_a_port(layout):
                raise
            progress.line(f"another process took one of our ports, trying others ({error.args[0].splitlines()[0]})")
            remove_cluster(layout)
    raise AssertionError("the loop returns or raises")


def _make_room(layout: ClusterLayout, progress: Progress) -> None:
    """Remove what earlier runs left of any cluster with a node; refuses when another one runs."""
    for root in sorted(layout.root.parent.iterdir()):
        record = load_record(root / layout.settings_file.name)
        if root == layout.root or record is None or not record.has_node:
            continue
        other = dataclasses.replace(layout, name=root.name, root=root)
        if noted_processes(other.pids):
            raise RequirementError(
                f"the cluster {other.name!r} has this machine's node;"
                f" `kvpilot-cluster down --name {other.name}` stops it"
            )
        progress.line(f"removing what is left of the cluster {other.name!r}")
        remove_cluster(other)
    if layout.root.exists():
        progress.line("removing what an earlier run left")
        remove_cluster(layout)
    network.refuse_foreign_chains()


def _start_once(
    layout: ClusterLayout, binaries: Mapping[str, Path], gpus: int, environ: Mapping[str, str], progress: Progress
) -> UpResult:
    began = progress.elapsed_s
    layout.make_folders()
    record = ClusterRecord(
        ports=choose_ports(),
        has_node=True,
        has_controllers=True,
        node_ip=network.node_address(),
        gpus=gpus,
        machine_before=network.read_settings(),
        had_kubelet_folder=KUBELET_DEFAULT.exists(),
        tables_before={family: network.tables_of(network.save_rules(family)) for family in network.FAMILIES},
    )
    record.save(layout.settings_file)
    plane = ControlPlane(layout, record, binaries)
    node = Node(plane)
    plane.write_identities()
    node.write_config()
    network.add_own_rules()
    plane.start(environ)
    node.start_runtime(environ, progress)
    plane.wait_ready(environ, progress)
    control_plane_s = progress.elapsed_s - began
    progress.line(f"control plane ready after {control_plane_s:.1f} s")
    node.start(environ)
    node.wait_ready(progress)
    node.offer_gpus(gpus)
    node_s = progress.elapsed_s - began
    progress.line(f"node ready after {node_s:.1f} s, with {gpus} GPUs that exist for the scheduler only")
    return UpResult(was_running=False, control_plane_s=control_plane_s, node_s=node_s)
