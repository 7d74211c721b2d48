"""The answer to a changed cap: how far the block pool has followed it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ResizeState(StrEnum):
    """What became of a resize."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """Outcome of one resize. REJECTED leaves the pool as it was."""

    state: ResizeState
    num_blocks_to_go: int = 0
    """Blocks above the cap that are still in use; they are held out as they get free."""
    reason: str = ""
    """For REJECTED: why, with the numbers."""
