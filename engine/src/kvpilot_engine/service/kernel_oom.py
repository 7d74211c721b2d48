"""How often the kernel's OOM killer has struck in this container, from the cgroup's own counter.

A child that ends by SIGKILL says nothing itself; the counter tells a kill for want of host memory from any other. With
cgroup v2 the kubelet has the whole container killed; with v1, or outside Kubernetes, the parent lives to tell.
"""

from __future__ import annotations

from pathlib import Path

_COUNTERS = ("memory.events", "memory/memory.oom_control")
"""Of cgroup v2 and v1, seen from inside the container."""


def count_kernel_oom_kills(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The number of kills so far; None where no counter can be read."""
    for name in _COUNTERS:
        try:
            lines = (root / name).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
    return None
