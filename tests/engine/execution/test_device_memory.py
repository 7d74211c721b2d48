"""The container's limits, read from pictures of /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpilot_engine.execution.cpu_threads import container_cpus
from kvpilot_engine.execution.device_memory import HostMemory

GIB = 1 << 30
MEMINFO = f"MemTotal:       {16 * GIB // 1024} kB\nMemAvailable:   {12 * GIB // 1024} kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> HostMemory:
    """A machine of 16 GiB without limits; this process holds 1 GiB."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    write(tmp_path / "proc/self/status", f"Name: x\nVmHWM: {2 * GIB // 1024} kB\nVmRSS:\t {GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    (tmp_path / "cgroup").mkdir()
    return HostMemory(proc_root=tmp_path / "proc", cgroup_root=tmp_path / "cgroup")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="ascii")


def test_without_a_limit_the_device_is_the_machine(machine: HostMemory) -> None:
    assert machine.total_bytes() == 16 * GIB
    assert machine.free_bytes() == 12 * GIB
    assert machine.process_bytes() == GIB


def test_cgroup_v2_limit_of_the_container(machine: HostMemory) -> None:
    root = machine.cgroup_root
    write(root / "memory.max", f"{2 * GIB}\n")
    write(root / "memory.current", f"{GIB}\n")
    write(root / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    assert machine.total_bytes() == 2 * GIB
    assert machine.free_bytes() == GIB + GIB // 2  # page cache that nobody uses can be had
    write(root / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n")
    assert machine.free_bytes() == GIB + GIB // 2
    assert machine.obtainable_bytes() == GIB + 3 * GIB // 4  # and in need, all of it


def test_own_family_is_this_process_and_its_parent(machine: HostMemory) -> None:
    assert machine.family_bytes() == GIB
    write(machine.proc_root / str(os.getppid()) / "status", f"Name: y\nVmRSS:\t {GIB // 2048} kB\n")
    assert machine.family_bytes() == GIB + GIB // 2


def test_the_smallest_limit_on_the_way_up_holds(machine: HostMemory) -> None:
    write(machine.proc_root / "self/cgroup", "0::/kubepods/pod1/container\n")
    write(machine.cgroup_root / "kubepods/pod1/container/memory.max", "max\n")
    write(machine.cgroup_root / "kubepods/pod1/memory.max", f"{3 * GIB}\n")
    write(machine.cgroup_root / "kubepods/memory.max", f"{8 * GIB}\n")
    assert machine.total_bytes() == 3 * GIB


def test_a_path_of_the_outside_falls_back_to_the_root(machine: HostMemory) -> None:
    """In a cgroup namespace the path may name what is not visible here."""
    write(machine.proc_root / "self/cgroup", "0::/../../elsewhere\n")
    write(machine.cgroup_root / "memory.max", f"{2 * GIB}\n")
    assert machine.total_bytes() == 2 * GIB


def test_cgroup_v1_limit_and_its_way_to_say_none(machine: HostMemory) -> None:
    write(machine.proc_root / "self/cgroup", "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n")
    folder = machine.cgroup_root / "memory/docker/abc"
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.total_bytes() == 16 * GIB
    write(folder / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(folder / "memory.stat", f"total_inactive_file {GIB}\n")
    assert machine.total_bytes() == 4 * GIB
    assert machine.free_bytes() == 2 * GIB


def test_an_explicit_total_replaces_all_of_it(machine: HostMemory) -> None:
    write(machine.cgroup_root / "memory.max", f"{2 * GIB}\n")
    named = HostMemory(override_bytes=3 * GIB, proc_root=machine.proc_root, cgroup_root=machine.cgroup_root)
    assert named.total_bytes() == 3 * GIB
    assert named.free_bytes() == 2 * GIB
    assert named.physical_bytes() == 2 * GIB
    write(machine.cgroup_root / "memory.current", f"{GIB}\n")
    assert named.obtainable_bytes() == GIB


def test_this_very_process_can_be_read() -> None:
    memory = HostMemory()
    assert 0 < memory.process_bytes() < memory.total_bytes()
    assert memory.peak_process_bytes() > 0


def test_threads_follow_the_cpu_quota(machine: HostMemory) -> None:
    allowed = container_cpus(machine.proc_root, machine.cgroup_root)
    assert allowed >= 1
    write(machine.cgroup_root / "cpu.max", "50000 100000\n")
    assert container_cpus(machine.proc_root, machine.cgroup_root) == 1
    write(machine.cgroup_root / "cpu.max", "max 100000\n")
    assert container_cpus(machine.proc_root, machine.cgroup_root) == allowed
    write(machine.proc_root / "self/cgroup", "2:cpu,cpuacct:/a\n")
    write(machine.cgroup_root / "cpu/a/cpu.cfs_quota_us", "100000\n")
    write(machine.cgroup_root / "cpu/a/cpu.cfs_period_us", "100000\n")
    assert container_cpus(machine.proc_root, machine.cgroup_root) == 1
