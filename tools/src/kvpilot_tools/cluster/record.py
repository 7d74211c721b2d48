"""What was decided at `up` and must be known by later commands, kept in one file of the cluster's folder.

Invariant: the file is written before anything that it describes is made, so a killed `up` can be cleaned by it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.processes import ProcessIdentity

# Below the kernel's usual range for outgoing connections (from 32768) and Kubernetes' node ports (from 30000), so that
# nobody is given such a port between our choosing and our binding it.
_PORT_RANGE = range(21000, 29900)


@dataclass(frozen=True, slots=True)
class Ports:
    """The control plane's listening ports."""

    api: int
    etcd_client: int
    etcd_peer: int
    controller_manager: int
    scheduler: int
    kubelet: int
    kubelet_health: int
    proxy_health: int
    proxy_metrics: int


def choose_ports() -> Ports:
    """Return ports that nobody listens on now; a start that loses a race for one is tried again with others."""
    names = [entry.name for entry in dataclasses.fields(Ports)]
    candidates = random.SystemRandom().sample(_PORT_RANGE, 20 * len(names))
    free = [port for port in candidates if _is_free(port)]
    if len(free) < len(names):
        raise RequirementError(f"no {len(names)} free ports between {_PORT_RANGE.start} and {_PORT_RANGE.stop}")
    return Ports(**dict(zip(names, free, strict=False)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """The facts of one cluster."""

    ports: Ports
    has_node: bool
    has_controllers: bool
    node_ip: str
    """The address that the API server advertises; the loopback address without a node."""
    gpus: int = 0
    owner: ProcessIdentity | None = None
    """The process that this cluster must not outlive; None: it stays until `down`."""
    machine_before: dict[str, str] = field(default_factory=dict)
    """Kernel settings by name, as they were before we changed them."""
    tables_before: dict[str, list[str]] = field(default_factory=dict)
    """Packet-filter tables by family, as they were."""
    had_kubelet_folder: bool = True
    """Whether the kubelet's default folder was there before; ours is elsewhere, but it makes this one too."""

    def save(self, file: Path) -> None:
        """Write the file in one step."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        partial.replace(file)


def load_record(file: Path) -> ClusterRecord | None:
    """Return the record; None when there is none or it can't be understood (another version wrote it)."""
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        owner = data.pop("owner")
        ports = Ports(**data.pop("ports"))
        return ClusterRecord(ports=ports, owner=None if owner is None else ProcessIdentity(**owner), **data)
    except (OSError, ValueError, KeyError, TypeError):
        return None
