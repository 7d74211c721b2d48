"""Settings of the core's parts. Each part declares its own; `kvpilot_engine.settings` composes and loads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    block_size: int = 16
    """Tokens per block. Small blocks waste less memory, large ones make shorter tables."""
    enable_prefix_caching: bool = True
    """Reuse blocks of equal prompt prefixes."""
    window: int | None = None
    """Tokens that the model still reads, itself included: blocks further back are given away. None: all are read.
    A property of the model, put in when it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, prefill and decode together; a bound where it is measured (ExecutionSettings)."""
    max_model_len: int = 2048
    """Longest sequence, prompt and output together, in tokens."""
    max_queue_len: int = 256
    """Most sequences waiting; one more is refused with 429."""
    preempt_every: int = 0
    """For tests: preempt somebody in every so-manieth step although there is room; 0: never. No output may change."""
