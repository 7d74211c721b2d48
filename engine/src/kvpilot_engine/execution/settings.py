"""Settings of the execution part. Composed and loaded by `kvpilot_engine.settings`; checked by loading.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STEP_TARGET_S = 0.15
"""The default of a command line that sets no token budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    model: Path
    """A GGUF file, a folder with exactly one, or a Hugging Face folder (see models/source.py for other spellings)."""
    dtype: str = "auto"
    """auto | float32. On the CPU auto is the compiled path: weights as stored, activations in 8 bit where weights are
    integers; float32 is the exact reference, on torch."""
    quantization: str = "auto"
    """auto | none | int8. auto and none keep the weights as the files store them; int8 turns plain 16 or 32 bit weights
    into blocks of 8 bit."""
    kv_cache_dtype: str = "auto"
    """auto | float16 | float32. auto is float16, and float32 with dtype float32."""
    device: str = "cpu"
    """cpu."""
    memory_utilization: float = 0.90
    """Share of the device's total memory for this process, 0..1."""
    max_memory_utilization: float = 0.95
    """Highest share that tuning may set later: the KV pool's address space is laid out for it (untouched pages cost no
    memory), so that a raised cap needs no restart."""
    device_memory_bytes: int | None = None
    """Total memory of the device; None: the container's limit, or the machine's memory where there is none."""
    step_target_s: float | None = None
    """Token budget from the measured speed, for prefill steps of about this many seconds and at most the scheduler's
    own budget; None: the scheduler's budget as it is."""
    num_threads: int | None = None
    """Threads of a matrix product; None: the container's CPU quota, at least 1."""
    num_blocks_override: int | None = None
    """Use at most this many KV blocks, however many fit; None: as many as fit."""
    kv_cache_memory_bytes: int | None = None
    """Use at most this much memory for KV blocks; None: what is left of the share."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the longest that fits, at most the model's own limit."""
