"""From a share of the device to a number of KV blocks, and back. Pure arithmetic; nothing is measured here.

    |<------------------ utilization x total ------------------>|
    | process base | weights | activations peak | null | blocks |

All sizes in bytes. Invariant: more share never gives fewer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.memory_report import round_share_up
from kvpilot_engine.errors import DoesNotFitError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    total_bytes: int
    process_base_bytes: int
    """The process before the model: interpreter, libraries, threads."""
    weights_bytes: int
    activations_peak_bytes: int
    bytes_per_block: int
    block_size: int
    num_blocks_limit: int | None = None
    """Upper bound set by the user (as blocks, or as bytes turned into blocks)."""

    @property
    def fixed_bytes(self) -> int:
        """What is needed before the first usable block; the null block counts here."""
        return self.process_base_bytes + self.weights_bytes + self.activations_peak_bytes + self.bytes_per_block

    def limit_bytes(self, utilization: float) -> int:
        return int(utilization * self.total_bytes)

    def num_blocks_at(self, utilization: float) -> int:
        """Usable blocks, the null block not counted; 0 when the share does not even hold what is fixed."""
        fitting = max(0, self.limit_bytes(utilization) - self.fixed_bytes) // self.bytes_per_block
        return fitting if self.num_blocks_limit is None else min(fitting, self.num_blocks_limit)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def required_bytes(self, max_model_len: int) -> int:
        """For everything fixed and one request of that length."""
        return self.fixed_bytes + self.num_blocks_for(max_model_len) * self.bytes_per_block

    def min_utilization(self, max_model_len: int) -> float:
        """Smallest share for one request of that length; above 1 when the device is too small."""
        return self.required_bytes(max_model_len) / self.total_bytes

    def longest_at(self, utilization: float) -> int:
        """Tokens of the longest single request."""
        return self.num_blocks_at(utilization) * self.block_size

    def resolve_max_model_len(self, utilization: float, wanted: int | None, model_limit: int) -> int:
        """The length to serve: `wanted`, or the longest that fits up to the model's limit.

        Raises DoesNotFitError with what is required, what there is, and what would do.
        """
        longest = self.longest_at(utilization)
        # one block must at least fit, or there is nothing to serve
        needed = wanted if wanted is not None else min(self.block_size, model_limit)
        if longest >= needed:
            return wanted if wanted is not None else min(longest, model_limit)
        required, available = self.required_bytes(needed), self.limit_bytes(utilization)
        suggested: dict[str, float | int] = {}
        limited_by_user = self.num_blocks_limit is not None and self.num_blocks_limit < self.num_blocks_for(needed)
        if required <= self.total_bytes and not limited_by_user:
            suggested["utilization"] = round_share_up(self.min_utilization(needed))
        if longest:
            suggested["max_model_len"] = min(longest, model_limit)
        raise DoesNotFitError(
            _explain(self, utilization, needed, required, available, suggested),
            required_bytes=required,
            available_bytes=available,
            suggested=suggested,
        )


def _explain(
    budget: MemoryBudget,
    utilization: float,
    needed: int,
    required: int,
    available: int,
    suggested: dict[str, float | int],
) -> str:
    """One line with both numbers and what would do."""
    what = f"one request of {needed} tokens needs {required} bytes"
    parts = (
        f"{budget.process_base_bytes} process, {budget.weights_bytes} weights, "
        f"{budget.activations_peak_bytes} activations, "
        f"{budget.bytes_per_block} per block of {budget.block_size} tokens"
    )
    have = f"a share of {utilization:g} of {budget.total_bytes} bytes is {available}"
    if budget.num_blocks_limit is not None:
        have += f", and the number of blocks is limited to {budget.num_blocks_limit}"
    advice = [
        f"raise the share to {suggested['utilization']:g}" if "utilization" in suggested else "",
        f"lower max_model_len to {suggested['max_model_len']}" if "max_model_len" in suggested else "",
    ]
    return (
        f"{what} ({parts}); {have}; {' or '.join(a for a in advice if a) or 'this device is too small for the model'}"
    )
