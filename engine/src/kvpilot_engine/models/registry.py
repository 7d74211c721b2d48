"""Which class runs which architecture: one line per model. Unknown architectures are refused in config.py, by name."""

from __future__ import annotations

from collections.abc import Callable

from kvpilot_engine.models.llama import LlamaForCausalLM, load_llama
from kvpilot_engine.models.weights import WeightSource


def load_model(
    source: WeightSource, *, max_positions: int, on_progress: Callable[[int, int], None] | None = None
) -> LlamaForCausalLM:
    """Build the model of an opened checkpoint; max_positions bounds the rotary tables."""
    return load_llama(source, max_positions=max_positions, on_progress=on_progress)
