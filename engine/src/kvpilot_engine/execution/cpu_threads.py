"""How many threads a matrix product may use: the container's CPU quota, not the machine's cores."""

from __future__ import annotations

import os
from pathlib import Path


def container_cpus(proc_root: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs allowed by affinity and by the smallest cgroup quota (rounded up), at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cpu_cgroups(proc_root, cgroup_root) if (quota := _read_quota(folder)) is not None]
    return max(1, min([allowed, *quotas]))


def _cpu_cgroups(proc_root: Path, cgroup_root: Path) -> list[Path]:
    try:
        lines = (proc_root / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            root = cgroup_root
        elif "cpu" in controllers.split(","):
            root = cgroup_root / "cpu"
        else:
            continue
        folder = root / path.lstrip("/")
        found += [place for place in (folder, *folder.parents) if place.is_relative_to(root) and place.is_dir()]
    return found


def _read_quota(folder: Path) -> int | None:
    """Whole CPUs of `cpu.max` ("quota period", v2) or `cpu.cfs_quota_us` (v1); None when unlimited."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return -(-int(quota) // int(period)) if quota.isdecimal() else None
