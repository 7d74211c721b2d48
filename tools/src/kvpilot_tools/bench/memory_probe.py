"""How much memory a server under load holds: the device by NVML, the server's own account, its processes.

Whatever of the three can be had is sampled; what can't is absent, never zero. NVML is asked only about this machine, so
only for a server on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import psutil

from kvpilot_tools.bench.streaming_client import Target

_PERIOD_S = 0.5


class Probe(Protocol):
    """One source of a number of bytes; None when it fell silent."""

    name: str

    async def read(self) -> int | None: ...


@dataclass(slots=True)
class ProcessProbe:
    """A process and its descendants, by proportional set size where the system tells it, else resident size."""

    pid: int
    name: str = "process"

    async def read(self) -> int | None:
        return process_tree_bytes(self.pid)


@dataclass(slots=True)
class ServerProbe:
    """kvpilot's GET /engine/memory."""

    session: aiohttp.ClientSession
    target: Target
    name: str = "server"

    async def read(self) -> int | None:
        with contextlib.suppress(aiohttp.ClientError, ValueError, TimeoutError):
            async with self.session.get(
                f"{self.target.url}/engine/memory", headers=self.target.headers, timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                if response.status == 200:
                    memory = (await response.json(content_type=None)).get("memory")
                    total = memory.get("process_total_bytes") if isinstance(memory, dict) else None
                    return total if isinstance(total, int) else None
        return None


@dataclass(slots=True)
class NvmlProbe:
    """What is used on one NVIDIA device, by whoever."""

    index: int
    name: str = "nvml"

    async def read(self) -> int | None:
        import pynvml  # absent without the extra; nvml_probe() has looked

        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(self.index)).used)
        except pynvml.NVMLError:
            return None


def nvml_probe(index: int) -> NvmlProbe | None:
    """A probe of that device; None without nvidia-ml-py, driver or device."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return None
    return NvmlProbe(index)


def process_tree_bytes(pid: int) -> int | None:
    """Memory of a process and its descendants, shared pages divided among them; None when it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile holds nothing
            info = member.memory_full_info()
            total += int(getattr(info, "pss", info.rss))
    return total


@dataclass(slots=True)
class MemoryPeaks:
    """The largest number seen of each probe, in bytes."""

    peaks: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, size: int | None) -> None:
        if size is not None:
            self.peaks[name] = max(size, self.peaks.get(name, 0))


@contextlib.asynccontextmanager
async def watch_memory(probes: list[Probe]) -> AsyncIterator[MemoryPeaks]:
    """Sample every probe twice a second while the block runs, and at its ends."""
    seen = MemoryPeaks()

    async def sample() -> None:
        for probe in probes:
            seen.take(probe.name, await probe.read())

    async def keep_sampling() -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await sample()

    await sample()
    task = asyncio.create_task(keep_sampling())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await sample()
