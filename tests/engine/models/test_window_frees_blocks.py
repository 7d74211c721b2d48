"""A model whose layers all have a window runs in a pool that can't hold its sequences, with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import NeverFitsError
from kvpilot_engine.execution.loading import load_engine
from kvpilot_engine.execution.settings import ExecutionSettings

NEW_TOKENS = 100
TIGHT_BLOCKS = 6
"""96 tokens; a sequence grows to 190 and reads 24."""


def generate(folder: Path, dtype: str, prompt: list[int], *, num_blocks: int) -> list[int]:
    loaded = load_engine(
        ExecutionSettings(
            model=folder,
            dtype=dtype,
            num_threads=1,
            max_model_len=256,
            device_memory_bytes=8 * 2**30,
            num_blocks_override=40,
        ),
        CacheSettings(block_size=16),
        SchedulerSettings(max_num_batched_tokens=32, max_num_seqs=4),
    )
    core = EngineCore(
        loaded.runner, num_blocks=num_blocks, cache=loaded.cache, scheduler=loaded.scheduler, model=loaded.cache_key
    )
    core.add_request(
        GenerationRequest(
            request_id=RequestId("a"),
            prompt_token_ids=tuple(map(TokenId, prompt)),
            sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
        )
    )
    tokens: list[int] = []
    while core.has_work:
        for output in core.step():
            assert not output.message
            tokens += output.new_token_ids
        core.check_invariants()
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_sequence_longer_than_the_pool_is_the_same_in_it(name: str, dtype: str, make_reference: Any) -> None:
    reference = make_reference(name)
    tight = generate(reference.folder, dtype, reference.prompt, num_blocks=TIGHT_BLOCKS)
    assert len(tight) == NEW_TOKENS
    assert tight == generate(reference.folder, dtype, reference.prompt, num_blocks=20)
    if dtype == "float32":
        assert tight[: len(reference.greedy)] == reference.greedy


def test_one_layer_that_reads_everything_keeps_all_blocks(make_reference: Any) -> None:
    reference = make_reference("gemma2")
    with pytest.raises(NeverFitsError, match="the whole KV cache holds 96"):
        generate(reference.folder, "float32", reference.prompt, num_blocks=TIGHT_BLOCKS)
