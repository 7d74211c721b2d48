"""How much memory the device has, and how much of it is ours. On the CPU the device is the container's memory limit.

Not for budgets (memory_budget.py). A container below a limited cgroup is bound by the smallest limit on the way up, so
all of them are read; cgroup v1 says "no limit" with a number near 2**63.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class DeviceMemory(Protocol):
    """Bytes of the device, asked for anew at every call."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What could still be allocated on the device, by anyone."""
        ...

    def process_bytes(self) -> int:
        """What this process holds."""
        ...


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The container's memory, from cgroup v2 or v1 and /proc. `override_bytes` replaces the total."""

    override_bytes: int | None = None
    proc_root: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def total_bytes(self) -> int:
        return self.physical_bytes() if self.override_bytes is None else self.override_bytes

    def physical_bytes(self) -> int:
        """The container's limit, whatever total the user set."""
        machine = self._meminfo("MemTotal")
        limits = [
            limit for folder, names in self._cgroups() if (limit := _read_number(folder / names.limit)) is not None
        ]
        return min([machine, *limits])

    def free_bytes(self) -> int:
        if self.override_bytes is not None:
            return max(0, self.override_bytes - self.process_bytes())
        # the kernel takes inactive page cache back before it kills
        return self._unused_bytes("inactive_file")

    def obtainable_bytes(self) -> int:
        """What could be allocated now if the kernel took back all page cache, whatever total the user set."""
        return self._unused_bytes("inactive_file", "active_file")

    def family_bytes(self) -> int:
        """What this process and its parent hold. A parent that can't be seen holds nothing."""
        try:
            parent = _read_kib(self.proc_root / str(os.getppid()) / "status", "VmRSS")
        except OSError:
            parent = 0
        return self.process_bytes() + parent

    def process_bytes(self) -> int:
        return _read_kib(self.proc_root / "self/status", "VmRSS")

    def peak_process_bytes(self) -> int:
        """Highest process_bytes since reset_peak."""
        return _read_kib(self.proc_root / "self/status", "VmHWM")

    def reset_peak(self) -> bool:
        """Start a new peak at what is held now; False where the kernel does not allow it."""
        try:
            (self.proc_root / "self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def _unused_bytes(self, *reclaimable: str) -> int:
        free = self._meminfo("MemAvailable")
        for folder, names in self._cgroups():
            limit, usage = _read_number(folder / names.limit), _read_number(folder / names.usage)
            if limit is not None and usage is not None and limit < self._meminfo("MemTotal"):
                cache = sum(_read_stat(folder / "memory.stat", names.stat_prefix + kind) for kind in reclaimable)
                free = min(free, limit - usage + cache)
        return max(0, free)

    def _meminfo(self, name: str) -> int:
        return _read_kib(self.proc_root / "meminfo", name)

    def _cgroups(self) -> list[tuple[Path, _CgroupFiles]]:
        """Our memory cgroups from the innermost up, as far as they are visible here."""
        try:
            lines = (self.proc_root / "self/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found: list[tuple[Path, _CgroupFiles]] = []
        for line in lines:
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0" and not controllers:
                found += [(folder, _V2) for folder in _upwards(self.cgroup_root, path)]
            elif "memory" in controllers.split(","):
                found += [(folder, _V1) for folder in _upwards(self.cgroup_root / "memory", path)]
        return found


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    limit: str
    usage: str
    stat_prefix: str
    """Of the counts in memory.stat that include what lies below."""


_V2 = _CgroupFiles("memory.max", "memory.current", "")
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(root: Path, path: str) -> list[Path]:
    """root/a/b, root/a, root. Inside a cgroup namespace the path is of the outside and may not exist: skipped."""
    folder = root / path.lstrip("/")
    candidates = [folder, *folder.parents]
    return [candidate for candidate in candidates if candidate.is_relative_to(root) and candidate.is_dir()]


def _read_number(file: Path) -> int | None:
    """A cgroup number; None for `max` and where there is no such file."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(value) for key, value in (line.split() for line in lines) if key == name), 0)


def _read_kib(file: Path, name: str) -> int:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no {name}")
