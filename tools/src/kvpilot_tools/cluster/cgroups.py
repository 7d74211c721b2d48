"""The control group that all pods of one cluster live in: made for the kubelet, emptied and removed after it.

Works with cgroup v1 (one tree per controller) and v2 (one tree). Invariant: only groups below our own are touched, so
that every process found there is one of our pods'.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from kvpilot_tools.cluster.errors import CleanupError
from kvpilot_tools.cluster.processes import ProcessIdentity, identify, stop

CGROUPS = Path("/sys/fs/cgroup")
REMOVE_LIMIT_S = 10.0


def group_name(cluster: str) -> str:
    """Return the name of a cluster's control group."""
    return f"kvpilot-{cluster}"


def _trees(root: Path) -> list[Path]:
    if (root / "cgroup.controllers").exists():
        return [root]
    # v1 links names such as `cpu` to a joint tree: following them would visit it twice.
    return sorted(tree for tree in root.iterdir() if tree.is_dir() and not tree.is_symlink())


def make_group(name: str, root: Path = CGROUPS) -> None:
    """Make the group in every tree; the kubelet demands that its root exists."""
    for tree in _trees(root):
        with contextlib.suppress(PermissionError):  # a tree of another kind, which the kubelet does not use either
            (tree / name).mkdir(exist_ok=True)


def processes_in(name: str, root: Path = CGROUPS) -> list[ProcessIdentity]:
    """Return every process in the group and below it."""
    pids: set[int] = set()
    for group in _groups(name, root):
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
    return [process for pid in sorted(pids) if (process := identify(pid)) is not None]


def remove_group(name: str, root: Path = CGROUPS) -> None:
    """Kill what is in the group and remove it; raises CleanupError when that fails."""
    deadline = time.monotonic() + REMOVE_LIMIT_S
    while True:
        stop(processes_in(name, root), grace_s=0)
        for group in _groups(name, root):
            with contextlib.suppress(OSError):
                group.rmdir()
        left = list(_groups(name, root))
        if not left:
            return
        if time.monotonic() > deadline:
            raise CleanupError(f"{len(left)} control groups can't be removed, among them {left[0]}")
        time.sleep(0.05)  # the kernel lets a group go a moment after its last process


def _groups(name: str, root: Path) -> Iterator[Path]:
    """Yield the groups, children before parents."""
    for tree in _trees(root):
        top = tree / name
        if top.is_dir():
            yield from sorted((path for path in top.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
            yield top
