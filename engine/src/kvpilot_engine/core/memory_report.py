"""Where every byte of the device goes: `GET /engine/memory`, metrics and operator read this one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE_STEP = 0.01
"""Suggested shares are rounded up to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """All sizes in bytes. `utilization` is this process's share of the device's total, 0..1.

    limit = utilization x device total
    limit >= process_base + weights + activations_peak + kv_reserved   (kv_reserved: what is left, in whole blocks)
    """

    device: str
    """Device kind or model name: `cpu`, `NVIDIA H100 80GB HBM3`."""
    device_total_bytes: int
    device_free_bytes: int
    utilization: float
    limit_bytes: int
    process_base_bytes: int
    weights_bytes: int
    activations_peak_bytes: int
    kv_reserved_bytes: int
    """Bytes of all blocks that the cap allows now."""
    kv_used_bytes: int
    """Bytes of blocks held by live requests."""
    kv_bytes_per_block: int
    kv_tokens: int
    """Tokens that the reserved blocks hold."""
    max_model_len: int
    min_utilization: float
    """Smallest share that still holds everything and one request of max_model_len."""
    process_total_bytes: int = 0
    """What the engine process holds now, as the system counts it."""
    graphs_bytes: int = 0
    allocator_idle_bytes: int = 0
    other_processes_bytes: int = 0

    @property
    def max_concurrency_at_max_len(self) -> float:
        return self.kv_tokens / self.max_model_len if self.max_model_len else 0.0


def round_share_up(share: float) -> float:
    """To the next hundredth, at most 1; a share that is a hundredth up to rounding stays."""
    return min(1.0, round(math.ceil(share / SHARE_STEP - 1e-9) * SHARE_STEP, 2))
