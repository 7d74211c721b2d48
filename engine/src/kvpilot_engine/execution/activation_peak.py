"""The most memory that a step takes beside weights and KV cache: an upper bound by arithmetic, and a measured value.

The bound is used before the weights are loaded (so that what can't fit is refused early) and under the measured value,
which alone sees what libraries keep for themselves but misses pages that were resident already. The greater one counts.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpilot_engine.core.ids import NULL_BLOCK, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.layers.linear import padded_rows
from kvpilot_engine.layers.torch_attention import KEY_GROUP, MAX_PAIRS, QUERY_TILE
from kvpilot_engine.models.decoder_config import DecoderConfig

_FLOAT = 4
_INDEX = 8
_SAMPLER_ROWS = 6
"""float64 rows of the vocabulary that the sampler holds for the sequence in hand: weights, sums, sorted copies, ids."""


def activation_bound_bytes(config: DecoderConfig, scheduler: SchedulerSettings, max_model_len: int) -> int:
    """Sum of the tensors that live at once in the widest moment of a step; each term an upper bound."""
    rows = padded_rows(scheduler.max_num_batched_tokens)
    query_width, kv_width = config.query_size, config.kv_size
    # hidden, normed, attended and one matrix product's input and output; the gated activation holds two halves more
    in_layer = (
        rows * (4 * config.hidden_size + max(4 * query_width + 4 * kv_width, 5 * config.intermediate_size)) * _FLOAT
    )
    longest_groups = -(-max_model_len // KEY_GROUP)
    pairs = max(MAX_PAIRS, longest_groups)
    tile_heads = QUERY_TILE * config.heads_per_kv
    # gathered keys or values, then per pair: queries or weighted values, scores and their copy
    per_pair = config.num_kv_heads * (KEY_GROUP + 2 * tile_heads) * config.head_dim * _FLOAT
    per_pair += 2 * config.num_kv_heads * tile_heads * (KEY_GROUP + 2) * _FLOAT
    tiles = -(-scheduler.max_num_batched_tokens // QUERY_TILE) + scheduler.max_num_seqs
    planned = (
        tiles * longest_groups * (config.num_kv_heads * KEY_GROUP * _INDEX * 2 + QUERY_TILE * KEY_GROUP + 2 * _INDEX)
    )
    sampled = padded_rows(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
    logits = sampled * (config.vocab_size + 2 * config.hidden_size) * _FLOAT
    sampler = _SAMPLER_ROWS * config.vocab_size * _INDEX
    return in_layer + pairs * per_pair + planned + max(logits, 0) + sampler


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
