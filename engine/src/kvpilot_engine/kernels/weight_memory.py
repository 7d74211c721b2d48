"""One piece of memory for all packed weights, on huge pages where the system gives them.

A decode step reads every weight once, front to back. On pages of 4 KiB each of them costs a look-up and stops the
processor's prefetching; matrices of a small model are each too small for huge pages, all of them together are not.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64
"""A cache line."""


class WeightMemory:
    """Hands out zeroed bytes from front to back; they are freed when the last array on them is gone."""

    def __init__(self, capacity_bytes: int) -> None:
        """Maps this much at once; pages become resident when they are written."""
        memory = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: slower, and right
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(memory, np.uint8)
        self._used = 0

    @property
    def used_bytes(self) -> int:
        return self._used

    def take(self, num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """[rows, row_bytes] at the start of a cache line; memory of its own when the capacity is used up."""
        size = num_rows * row_bytes
        if self._used + size > self._memory.size:
            return aligned_zeros(num_rows, row_bytes)
        taken = self._memory[self._used : self._used + size].reshape(num_rows, row_bytes)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken


def aligned_zeros(num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """The same without a common memory."""
    memory = np.zeros(num_rows * row_bytes + _ALIGNMENT, np.uint8)
    skipped = -memory.ctypes.data % _ALIGNMENT
    return memory[skipped : skipped + num_rows * row_bytes].reshape(num_rows, row_bytes)
