"""The most memory that a step takes beside weights and KV cache, measured on the widest step that there can be.

The arithmetic bound is each compute path's own; the measured value alone sees what libraries keep for themselves, but
misses pages that were resident already. The greater one counts.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpilot_engine.core.ids import NULL_BLOCK, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.device_memory import HostMemory


def build_warmup_plan(scheduler: SchedulerSettings, max_model_len: int) -> SchedulerOutput:
    """A step at the token budget with as many sampling sequences as it can have, all with top-k and top-p.

    Every token goes to the null block: the plan needs no pool, and the caller zeroes that block afterwards.
    """
    num_sequences = max(1, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
    rest = scheduler.max_num_batched_tokens - (num_sequences - 1)
    counts = [1] * (num_sequences - 1)
    while rest > 0 and len(counts) < scheduler.max_num_seqs:
        counts.append(min(rest, max_model_len))
        rest -= counts[-1]
    table = (NULL_BLOCK,) * max_model_len  # long enough for every block size
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=0)
    return SchedulerOutput(
        tuple(
            ScheduledSequence(RequestId(f"warmup-{index}"), 0, (TokenId(0),) * count, table, sampling, 0, samples=True)
            for index, count in enumerate(counts)
        )
    )


def measure_peak_growth(memory: HostMemory, run: Callable[[], object]) -> int | None:
    """Growth of the resident set while `run` runs, at its highest; None where the kernel keeps no resettable peak."""
    if not memory.reset_peak():
        run()
        return None
    before = memory.process_bytes()
    run()
    return max(0, memory.peak_process_bytes() - before)
