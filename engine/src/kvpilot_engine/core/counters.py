"""The core's running counts, from which EngineStats is taken. They only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpilot_engine.core.scheduler_output import FinishReason


@dataclass(slots=True)
class Counters:
    """Mutable; changed by the scheduler only, and by commits only, except preemptions and outcomes."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
