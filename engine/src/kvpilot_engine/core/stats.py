"""Counts that the shell exports, as one frozen snapshot. Taken after each step, after each command and when idle."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpilot_engine.core.block_size_advice import BlockSizeAdvice, build_no_advice


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Gauges describe this moment; `*_total` only grow while the process lives."""

    num_running: int = 0
    num_waiting_capacity: int = 0
    """Waiting because blocks or places in the batch are missing."""
    num_waiting_budget: int = 0
    """Waiting only because this step's token budget was used up, or for a prefix that is just being computed."""
    num_swapped_out: int = 0
    """Waiting after a preemption (also counted under capacity or budget)."""
    num_blocks_total: int = 0
    """Blocks the pool may use now: without the null block and without blocks held out by the cap."""
    num_blocks_held_out: int = 0
    num_blocks_free: int = 0
    """Neither referenced nor cached."""
    num_blocks_cached: int = 0
    """Not referenced, but still holding a reusable prefix."""
    num_blocks_used: int = 0
    """Referenced by live requests."""
    block_size: int = 16
    num_steps_total: int = 0
    num_preemptions_total: int = 0
    num_recomputed_tokens_total: int = 0
    num_prompt_tokens_total: int = 0
    num_generation_tokens_total: int = 0
    num_prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits_total: int = 0
    """Prompt tokens found there; tokens recomputed after a preemption are not counted as hits."""
    finished_total: dict[str, int] = field(default_factory=dict)
    """Sequences ended, by finish reason (every reason present, 0 at first)."""
    block_size_advice: BlockSizeAdvice = field(default_factory=lambda: build_no_advice(16))
    """What the newest requests say about the block size."""

    @property
    def kv_usage_ratio(self) -> float:
        """Blocks held by live requests ÷ usable blocks, 0..1; 0 when idle even with a full prefix cache."""
        return self.num_blocks_used / self.num_blocks_total if self.num_blocks_total else 0.0

    @property
    def kv_cached_ratio(self) -> float:
        return self.num_blocks_cached / self.num_blocks_total if self.num_blocks_total else 0.0
