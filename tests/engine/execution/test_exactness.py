"""A request's logits are the same bits in company, in chunks, after preemption and prefix hits, in any block size."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpilot_engine.core.sampling_params import SamplingParams

LENGTHS = (1, 3, 15, 16, 17, 63, 33, 50, 130)
"""Around the borders of blocks, row tiles and key groups."""
MAX_TOKENS = 20
TIGHT_BLOCKS = {8: 14, 16: 6}
"""So few that sequences are preempted, by the size of a block."""
"""Of 8 tokens: the longest of the short prompts fits with its output, and not much beside it."""


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    source = random.Random(3)
    return {number: [source.randrange(300) for _ in range(length)] for number, length in enumerate(LENGTHS)}


@pytest.fixture(scope="module")
def alone(tiny: Any, prompts: dict[int, list[int]]) -> Any:
    return tiny.run(prompts, max_tokens=MAX_TOKENS, one_by_one=True)


def test_batched_equals_alone_bit_by_bit(tiny: Any, prompts: dict[int, list[int]], alone: Any) -> None:  # A6
    together = tiny.run(prompts, max_tokens=MAX_TOKENS)
    assert together.logits == alone.logits
    assert together.tokens == alone.tokens


@pytest.mark.parametrize("budget", [9, 13, 32])
def test_chunked_equals_unchunked_bit_by_bit(tiny: Any, prompts: dict[int, list[int]], alone: Any, budget: int) -> None:
    assert tiny.run(prompts, max_tokens=MAX_TOKENS, budget=budget).logits == alone.logits


def test_preempted_equals_undisturbed_bit_by_bit(tiny: Any, prompts: dict[int, list[int]], alone: Any) -> None:
    short = {number: prompt for number, prompt in prompts.items() if len(prompt) <= 50}
    size = tiny.smallest_block
    tight = tiny.run(short, max_tokens=MAX_TOKENS, num_blocks=TIGHT_BLOCKS[size], budget=40, block_size=size)
    assert tight.stats.num_preemptions_total > 0
    assert tight.logits == {number: alone.logits[number] for number in short}


def test_prefix_hit_equals_cold_bit_by_bit(tiny: Any, alone: Any, prompts: dict[int, list[int]]) -> None:  # A8
    # 33 twice, then a prompt of exactly two blocks that is wholly cached
    again = {6: prompts[6], 16: prompts[6], 17: prompts[6][:32]}
    warm = tiny.run(again, max_tokens=MAX_TOKENS, prefix_caching=True, one_by_one=True)
    cold = tiny.run(again, max_tokens=MAX_TOKENS, one_by_one=True)
    assert warm.stats.num_prefix_hits_total >= 32 + 16
    assert warm.logits == cold.logits
    assert warm.logits[6] == warm.logits[16] == alone.logits[6]


@pytest.mark.parametrize("multiple", [1, 3, 4])
def test_block_size_changes_no_bit(tiny: Any, prompts: dict[int, list[int]], alone: Any, multiple: int) -> None:
    block_size = tiny.smallest_block * multiple
    assert tiny.run(prompts, max_tokens=MAX_TOKENS, block_size=block_size, num_blocks=100).logits == alone.logits


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_reference_takes_any_block_size(tiny_float32: Any, prompts: dict[int, list[int]], block_size: int) -> None:
    usual = tiny_float32.run(prompts, max_tokens=MAX_TOKENS)
    unusual = tiny_float32.run(prompts, max_tokens=MAX_TOKENS, block_size=block_size, num_blocks=700)
    assert unusual.logits == usual.logits


def test_workspace_chunks_change_no_bit(
    tiny_float32: Any, prompts: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_float32.run(prompts, max_tokens=MAX_TOKENS)
    monkeypatch.setattr("kvpilot_engine.layers.torch_attention.MAX_PAIRS", 3)
    assert tiny_float32.run(prompts, max_tokens=MAX_TOKENS).logits == whole.logits


def test_sampled_tokens_survive_preemption_and_company(tiny: Any, prompts: dict[int, list[int]]) -> None:
    def sampling(number: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=MAX_TOKENS, temperature=1.0, top_p=0.9, top_k=number * 7, seed=number, ignore_eos=True
        )

    short = {number: prompt for number, prompt in prompts.items() if len(prompt) <= 50}
    alone = tiny.run(short, max_tokens=MAX_TOKENS, one_by_one=True, sampling=sampling)
    size = tiny.smallest_block
    tight = tiny.run(
        short, max_tokens=MAX_TOKENS, num_blocks=TIGHT_BLOCKS[size], budget=40, block_size=size, sampling=sampling
    )
    assert tight.stats.num_preemptions_total > 0
    assert tight.tokens == alone.tokens


@pytest.mark.model
def test_real_model_is_exact_under_chunks_company_preemption_and_prefix_hits(smollm2: Any) -> None:  # A6
    source = random.Random(5)
    prompts = {number: [source.randrange(49152) for _ in range(length)] for number, length in enumerate((5, 16, 33))}
    alone = smollm2.run(prompts, max_tokens=20, one_by_one=True)
    disturbed = smollm2.run(
        prompts | {3: prompts[2]}, max_tokens=20, num_blocks=13, block_size=8, budget=24, prefix_caching=True
    )
    assert disturbed.stats.num_preemptions_total > 0
    assert {number: disturbed.logits[number] for number in prompts} == alone.logits
    assert disturbed.logits[3] == alone.logits[2]
