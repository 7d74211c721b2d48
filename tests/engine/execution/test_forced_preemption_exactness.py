"""Preemption when nobody needs the blocks: the same bits come out of the model, whatever it was just computing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpilot_engine.core.sampling_params import SamplingParams

MAX_TOKENS = 16


def sampling(number: int) -> SamplingParams:
    """Every other one by chance, with a choice that depends on all tokens before it."""
    return SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=float(number % 2),
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        seed=number,
        ignore_eos=True,
    )


@pytest.mark.parametrize(("every", "caching"), [(2, True), (3, False)])
def test_forced_preemption_changes_no_bit(tiny: Any, every: int, caching: bool) -> None:
    source = random.Random(every)
    prompts = {number: [source.randrange(300) for _ in range(5 + 11 * number)] for number in range(5)}
    alone = tiny.run(prompts, max_tokens=MAX_TOKENS, one_by_one=True, sampling=sampling)
    disturbed = tiny.run(
        prompts,
        max_tokens=MAX_TOKENS,
        budget=40,
        block_size=tiny.smallest_block,
        prefix_caching=caching,
        preempt_every=every,
        sampling=sampling,
    )
    assert disturbed.stats.num_preemptions_total > 5
    assert disturbed.tokens == alone.tokens
    assert disturbed.logits == alone.logits


@pytest.mark.model
def test_forced_preemption_changes_no_bit_of_the_real_model_compiled(smollm2_compiled: Any) -> None:  # A6
    source = random.Random(9)
    prompts = {number: [source.randrange(49152) for _ in range(length)] for number, length in enumerate((4, 17, 40))}
    alone = smollm2_compiled.run(prompts, max_tokens=MAX_TOKENS, one_by_one=True, sampling=sampling)
    block_size = smollm2_compiled.smallest_block
    disturbed = smollm2_compiled.run(
        prompts, max_tokens=MAX_TOKENS, budget=40, block_size=block_size, preempt_every=3, sampling=sampling
    )
    assert disturbed.stats.num_preemptions_total > 5
    assert disturbed.tokens == alone.tokens
    assert disturbed.logits == alone.logits
