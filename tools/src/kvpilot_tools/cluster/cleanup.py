"""Taking away everything that a cluster made, whatever state a killed run left it in.

The one path for `down` and for the start of `up`. Things are recognised by what only we use: pid files, the cluster's
folder in a command line, the control group, the bridge's name, chain names. Invariant: the cluster's folder goes
last, since it holds the record by which the rest is found; so a clean-up that was killed can be run again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvpilot_tools.cluster import cgroups, engine_env, mounts, network
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.processes import PROC, ProcessIdentity, identify, noted_processes, stop
from kvpilot_tools.cluster.record import ClusterRecord, load_record

_SHIM_SOCKETS = Path("/run/containerd/s")
_CNI_RESULTS = Path("/var/lib/cni/results")
_CONTAINER_LOGS = Path("/var/log/containers")
# The kubelet makes a socket for device plugins here, wherever its own root is.
KUBELET_DEFAULT = Path("/var/lib/kubelet")
_OUR_PROGRAMS = frozenset(
    {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kube-proxy",
        "kubelet",
        "containerd",
        "containerd-shim-runc-v2",
        "runc",
    }
)


def remove_cluster(layout: ClusterLayout) -> None:
    """Remove the cluster; fine when there is nothing. The image store stays, as binaries in the cache do."""
    if not layout.root.exists():
        return
    record = load_record(layout.settings_file)
    stop(noted_processes(layout.pids), grace_s=0)
    stop(stray_processes(layout.root), grace_s=0)
    # Without a readable record only what bears our name is taken; the rules are, if our own chain is among them.
    if os.geteuid() == 0 and (record is None or record.has_node):
        _remove_node(layout, record)
    mounts.remove_tree(layout.root)


def stray_processes(root: Path, proc: Path = PROC) -> list[ProcessIdentity]:
    """Return components without a pid file: `up` was killed before it wrote it, or they are containerd's shims."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if is_component(command, root) and (process := identify(int(entry.name))) is not None:
            found.append(process)
    return found


def is_component(command: list[str], root: Path) -> bool:
    """Tell whether a command line is one of our programs working on that cluster's folder."""
    return Path(command[0]).name in _OUR_PROGRAMS and any(f"{root}/" in argument for argument in command[1:])


def _remove_node(layout: ClusterLayout, record: ClusterRecord | None) -> None:
    cgroups.remove_group(cgroups.group_name(layout.name))
    _remove_shim_sockets(layout)
    mounts.release(layout.root)
    mounts.release(layout.image_store)
    network.remove_links()
    if record is not None or network.has_own_rules():
        network.remove_rules(record.tables_before if record is not None else {})
    if record is not None:
        network.restore_settings(record.machine_before)
    for result in _CNI_RESULTS.glob("*"):
        # Also the loopback network's, which bear a name that is not ours: they name the pod's network namespace.
        if f"{layout.root}/" in result.read_text(errors="replace"):
            result.unlink()
    for link in _CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and layout.root in link.readlink().parents:
            link.unlink()
    engine_env.remove()
    if record is not None and not record.had_kubelet_folder:
        mounts.remove_tree(KUBELET_DEFAULT)
    for folder in (_SHIM_SOCKETS, _CNI_RESULTS):
        # Empty ones go; what others use too stays.
        with contextlib.suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()
    with contextlib.suppress(OSError):
        _CONTAINER_LOGS.rmdir()


def _remove_shim_sockets(layout: ClusterLayout) -> None:
    """Remove sockets that containerd keeps outside its own folders; each shim's folder names its own."""
    for file in layout.containerd_state.glob("io.containerd.runtime.v2.task/*/*/address"):
        socket = Path(file.read_text().strip().removeprefix("unix://"))
        if _SHIM_SOCKETS in socket.parents:
            socket.unlink(missing_ok=True)
