"""Threads of the CPU path: how many (the container's CPU quota, not the machine's cores) and how patient.

Imports no torch: what OpenMP reads from the environment must be set before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

SPIN_COUNT = 1000
"""Turns that a thread waits for the others at the end of a parallel region before it gives its core up. OpenMP's own
default is 300,000: with as many threads as cores and another process on them, the waiting keeps the late thread from
its core, and a step takes ten times as long. Without any turns each region pays for putting threads to sleep."""


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Set SPIN_COUNT for an OpenMP library that is not loaded yet, unless the user has said how threads wait."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def prefer_openmp(environ: MutableMapping[str, str]) -> None:
    """Let numba's threads be OpenMP's where its library is installed, unless the user has chosen: numba's own kind
    makes a decode step nearly twice as long. For a numba that is not imported yet."""
    if not {"NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY"} & environ.keys():
        environ["NUMBA_THREADING_LAYER_PRIORITY"] = "omp tbb workqueue"


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
