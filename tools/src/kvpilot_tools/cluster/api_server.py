"""An API server without a node: for tests and tools that need real Kubernetes rules but no pods.

Works without root. Invariant: a server made by `api_server()` never outlives the process that made it for longer than
until the next one is started, even when that process was killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.assets import API_ONLY_ASSETS, AssetStore
from kvpilot_tools.cluster.control_plane import ControlPlane
from kvpilot_tools.cluster.errors import StartError
from kvpilot_tools.cluster.layout import CONTEXT_NAME, ClusterLayout, layout_for, state_home
from kvpilot_tools.cluster.processes import ProcessIdentity, identify, is_alive, noted_processes, stop
from kvpilot_tools.cluster.progress import Progress, silent
from kvpilot_tools.cluster.record import ClusterRecord, choose_ports, load_record

START_ATTEMPTS = 3

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server."""

    kubeconfig: Path
    context: str
    kubectl: Path
    """A kubectl of the same version."""


@contextmanager
def api_server(*, with_controllers: bool = False, progress: Progress | None = None) -> Iterator[ApiServer]:
    """Run an API server for the duration of a `with` block; building missing binaries first can take minutes."""
    environ, out = os.environ, progress or silent()
    sweep_orphans(environ)
    layout = layout_for(f"api-{os.getpid()}-{next(_numbers)}", environ)
    binaries = AssetStore.from_environ(environ).ensure(API_ONLY_ASSETS, out)
    try:
        start_api_only(
            layout,
            binaries,
            with_controllers=with_controllers,
            owner=identify(os.getpid()),
            environ=environ,
            progress=out,
        )
        yield ApiServer(kubeconfig=layout.kubeconfig, context=CONTEXT_NAME, kubectl=binaries["kubectl"])
    finally:
        remove_api_only(layout)


def start_api_only(
    layout: ClusterLayout,
    binaries: Mapping[str, Path],
    *,
    with_controllers: bool,
    owner: ProcessIdentity | None,
    environ: Mapping[str, str],
    progress: Progress,
) -> ControlPlane:
    """Start etcd and the API server in a fresh folder; raises StartError with the log's tail."""
    for attempt in range(1, START_ATTEMPTS + 1):
        remove_api_only(layout)
        layout.make_folders()
        record = ClusterRecord(
            ports=choose_ports(), has_node=False, has_controllers=with_controllers, node_ip="127.0.0.1", owner=owner
        )
        record.save(layout.settings_file)
        plane = ControlPlane(layout, record, binaries)
        plane.write_identities()
        try:
            plane.start(environ)
            plane.wait_ready(environ, progress)
        except StartError as error:
            if attempt == START_ATTEMPTS or not lost_a_port(layout):
                raise
            progress.line(f"another process took one of our ports, trying others ({error.args[0].splitlines()[0]})")
        else:
            return plane
    raise AssertionError("the loop returns or raises")


def lost_a_port(layout: ClusterLayout) -> bool:
    """Tell whether a component's log says that its port was taken."""
    return any("address already in use" in log.read_text(errors="replace") for log in layout.logs.glob("*.log"))


def remove_api_only(layout: ClusterLayout) -> None:
    """Stop what runs and delete the folder; fine when there is nothing. No grace: nobody wants the data."""
    stop(noted_processes(layout.pids), grace_s=0)
    shutil.rmtree(layout.root, ignore_errors=True)


def sweep_orphans(environ: Mapping[str, str]) -> None:
    """Remove API servers whose owner is gone."""
    for root in state_home(environ, is_root=os.geteuid() == 0).glob("api-*"):
        layout = layout_for(root.name, environ)
        record = load_record(layout.settings_file)
        if record is not None and not record.has_node and record.owner is not None and not is_alive(record.owner):
            remove_api_only(layout)
