"""Every architecture against transformers: the same logits and the same greedy tokens, through the paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpilot_engine.models.weights import open_weights

NAMES = (
    "llama",
    "llama3-scaling",
    "llama-linear",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-long",
)
TOLERANCE = 1e-4
"""Of the largest logit; float32 sums in another order."""


def assert_close(ours: torch.Tensor, theirs: np.ndarray[Any, Any]) -> None:
    difference = np.abs(ours.numpy() - theirs).max()
    assert difference <= TOLERANCE * np.abs(theirs).max(), f"differs by {difference}"


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, make_reference: Any, open_paged: Any) -> None:
    reference = make_reference(name)
    paged = open_paged(reference.folder)
    assert reference.logits.std() > 0.1
    assert len(set(reference.greedy)) > 3
    assert_close(paged.compute(reference.prompt, 33, 1, 40), reference.logits)
    tokens, _ = paged.generate({7: reference.prompt}, len(reference.greedy))
    assert tokens[7] == reference.greedy


@pytest.mark.parametrize("name", NAMES)
def test_batched_equals_alone_bit_by_bit(name: str, make_reference: Any, open_paged: Any) -> None:  # A6
    reference = make_reference(name)
    prompts = {number: reference.prompt[number:length] for number, length in enumerate((70, 3, 30, 90))}
    together = open_paged(reference.folder).generate(prompts, 4)[1]
    alone = open_paged(reference.folder)
    for number, prompt in prompts.items():
        assert torch.equal(alone.generate({number: prompt}, 4)[1][number], together[number])


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_chunks_and_block_sizes_change_no_bit(name: str, make_reference: Any, open_paged: Any) -> None:
    reference = make_reference(name)
    whole = open_paged(reference.folder).compute(reference.prompt)
    assert torch.equal(open_paged(reference.folder, block_size=5).compute(reference.prompt, 1, 30, 2, 25), whole)


def test_short_factors_hold_where_no_longer_length_is_served(make_reference: Any, open_paged: Any) -> None:
    reference = make_reference("phi3-long")
    short, long = (open_paged(reference.folder, max_positions=length) for length in (64, 65))
    assert_close(short.compute(reference.prompt[:60]), reference.short_logits)
    assert np.abs(long.compute(reference.prompt[:60]).numpy() - reference.short_logits).max() > 0.1


@pytest.mark.parametrize(
    ("name", "windows", "common"),
    [
        ("llama", (None, None, None), None),
        ("mistral", (24, 24, 24), 24),
        ("qwen2", (None, 24, 24), None),
        ("gemma2", (24, None, 24), None),
        ("gemma3", (24, None, 24), None),
        ("phi3", (24, 24, 24), 24),
    ],
)
def test_windows_of_layers_and_of_the_whole_decoder(
    name: str, windows: tuple[int | None, ...], common: int | None, make_reference: Any
) -> None:
    with open_weights(make_reference(name).folder) as source:
        assert tuple(layer.window for layer in source.config.layers) == windows
        assert source.config.window == common
