"""Every architecture on the compiled path, held to transformers' float32: prompts longer than windows, then decode."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.compiled_path import CompiledPath
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.models.weights import open_weights

BLOCK_SIZE = 16
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
NAMES = ("llama", "llama3-scaling", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi3-long")
TOLERANCES = {"float16": 0.01, "auto": 0.03}
"""Of the largest logit, by how keys and values are kept; auto may be bfloat16."""


def compute_last_rows(
    folder: Path, prompt: list[int], following: list[int], kv_cache_dtype: str
) -> npt.NDArray[np.float32]:
    """Logits after the prompt, in two chunks, and after each following token."""
    path = CompiledPath(kv_cache_dtype=kv_cache_dtype)
    with open_weights(folder) as source:
        path.check(source.config, BLOCK_SIZE)
        path.load_weights(source, max_positions=256, on_progress=lambda *_: None)
    scheduler = SchedulerSettings(max_num_batched_tokens=128, max_model_len=256, max_num_seqs=4)
    runner = path.make_runner(scheduler, num_blocks=12, block_size=BLOCK_SIZE, memory=HostMemory())
    table = tuple(map(BlockId, (7, 3, 11, 5, 9, 1, 12)))
    tokens = tuple(map(TokenId, prompt + following))
    rows = []
    cuts = [0, 50, *range(len(prompt), len(tokens) + 1)]
    for start, end in pairwise(cuts):
        sequence = ScheduledSequence(RequestId("a"), start, tokens[start:end], table, SAMPLING, 0, samples=True)
        rows.append(runner.compute_logits(SchedulerOutput((sequence,)))[0])
    return np.array(rows[1:])


@pytest.mark.parametrize("kv_cache_dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_logits_are_near_those_of_transformers(name: str, kv_cache_dtype: str, make_reference: Any) -> None:
    reference = make_reference(name)
    prompt, following = reference.prompt[:80], reference.prompt[80:]
    ours = compute_last_rows(reference.folder, prompt, following, kv_cache_dtype)
    theirs = reference.logits[79:]
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= TOLERANCES[kv_cache_dtype] * np.abs(theirs).max()
