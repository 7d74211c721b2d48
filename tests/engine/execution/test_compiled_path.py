"""The compiled path: close to the float32 reference, whole from settings to tokens, and without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import DeviceOutOfMemoryError, ModelExecutionError, OOMPhase, SettingsError
from kvpilot_engine.execution import step_runner
from kvpilot_engine.execution.compiled_weights import load_compiled_weights, weights_bytes
from kvpilot_engine.execution.loading import load_engine
from kvpilot_engine.execution.paged_kv_storage import KVDtype, choose_kv_dtype
from kvpilot_engine.execution.settings import ExecutionSettings
from kvpilot_engine.models.weights import open_weights

SCHEDULER = SchedulerSettings(max_num_batched_tokens=64, max_num_seqs=8)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture
def settings(tiny_folder: Path) -> ExecutionSettings:
    return ExecutionSettings(model=tiny_folder, num_threads=1, num_blocks_override=50)


def load(settings: ExecutionSettings, **changes: Any) -> Any:
    return load_engine(settings, CacheSettings(), replace(SCHEDULER, **changes))


def make_plan(token_ids: list[int], sampling: SamplingParams = GREEDY, **fields: Any) -> SchedulerOutput:
    tokens = tuple(map(TokenId, token_ids))
    table = tuple(map(BlockId, range(1, 2 + len(tokens) // 16)))
    return SchedulerOutput(
        (ScheduledSequence(RequestId("a"), 0, tokens, table, sampling, 0, **({"samples": True} | fields)),)
    )


def logits_of(settings: ExecutionSettings, token_ids: list[int]) -> npt.NDArray[np.float32]:
    runner: step_runner.StepRunner = load(settings).runner
    return runner.compute_logits(make_plan(token_ids))


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "error"),
    [("auto", "float32", 2e-5), ("none", "float16", 5e-3), ("none", "auto", 0.03), ("int8", "auto", 0.1)],
)
def test_logits_are_close_to_the_reference(
    settings: ExecutionSettings, quantization: str, kv_cache_dtype: str, error: float
) -> None:
    tokens = list(range(40, 90))
    expected = logits_of(replace(settings, dtype="float32"), tokens)
    found = logits_of(replace(settings, quantization=quantization, kv_cache_dtype=kv_cache_dtype), tokens)
    assert 0 < np.abs(found - expected).max() < error * np.abs(expected).max()


def test_sizes_are_told_before_weights_are_read(tiny_folder: Path) -> None:
    with open_weights(tiny_folder) as source:
        for quantize, in_tiles in ((False, False), (True, False), (False, True), (True, True)):
            weights = load_compiled_weights(source, max_positions=32, quantize_plain=quantize, in_tiles=in_tiles)
            matrices = [weights.embedding, *(matrix for layer in weights.layers for matrix in layer.matrices)]
            norms = weights.norm.nbytes + sum(
                layer.attention_norm.nbytes + layer.mlp_norm.nbytes for layer in weights.layers
            )
            tables = weights.layers[0].cos.nbytes + weights.layers[0].sin.nbytes
            told = weights_bytes(source, max_positions=32, quantize_plain=quantize, in_tiles=in_tiles)
            held = sum(matrix.size_bytes for matrix in matrices) + norms + tables
            # joined matrices share the bytes that fill up their last blocks
            assert 0.98 * told <= held <= told


def test_report_counts_half_precision_and_the_arena(settings: ExecutionSettings) -> None:
    engine = load(settings)
    report = engine.memory_report(utilization=0.9, num_usable_blocks=50, num_used_blocks=2)
    assert report.kv_bytes_per_block == 2 * 2 * 2 * 16 * 16 * 2
    assert report.weights_bytes > 150_000 * 4
    wider = load(settings, max_num_batched_tokens=4096)
    arena = wider.budget.activations_peak_bytes - engine.budget.activations_peak_bytes
    assert arena > (4096 - 64) * 4 * (3 * 96 + 2 * 160)


def test_cached_prefixes_carry_the_arithmetic(settings: ExecutionSettings) -> None:
    several: tuple[dict[str, Any], ...] = (
        {},
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "float32"},
    )
    keys = {load(replace(settings, **changes)).cache_key for changes in several}
    assert len(keys) == 4


def test_what_has_no_kernels_is_refused_by_name(settings: ExecutionSettings) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; supported on cpu: auto, float16, bfloat16, float32"),
        ({"quantization": "gptq"}, "quantization is 'gptq'; supported on cpu: auto, none, int8"),
        ({"dtype": "float32", "quantization": "int8"}, "with dtype float32 it must be auto or none"),
    )
    for changes, message in refused:
        with pytest.raises(SettingsError, match=message):
            load(replace(settings, **changes))
    with pytest.raises(SettingsError, match="block_size is 12; on cpu it must be a multiple of 8"):
        load_engine(settings, CacheSettings(block_size=12), SCHEDULER)


@pytest.mark.parametrize(
    ("tokens", "place", "phase"),
    [([1, 2], "build_batch_inputs", OOMPhase.PREFILL), ([1], "sample", OOMPhase.SAMPLE)],
)
def test_a_failed_allocation_names_its_phase(
    settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch, tokens: list[int], place: str, phase: OOMPhase
) -> None:
    engine = load(settings)

    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.50 GiB for an array")

    monkeypatch.setattr(step_runner, place, fail)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        engine.runner.execute(make_plan(tokens))
    assert (caught.value.phase, caught.value.requested_bytes) == (phase, 3 << 29)


def test_a_token_outside_the_vocabulary_fails_the_step_only(settings: ExecutionSettings) -> None:
    engine = load(settings)
    with pytest.raises(ModelExecutionError, match="token ids must be between 0 and 300"):
        engine.runner.execute(make_plan([1, 301]))
    assert engine.runner.execute(make_plan([1, 2])).sampled


def test_log_probabilities_of_a_prompt_come_in_chunks_of_bounded_size(  # A13
    settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full-length prompt with all its log-probabilities: no more rows of logits at once than the budget holds."""
    tokens = [token % 300 for token in range(50)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    plan = make_plan(tokens, sampling, prompt_targets=tuple(map(TokenId, tokens[1:])))
    whole = load(settings).runner.execute(plan)

    monkeypatch.setattr(step_runner, "LOGITS_BYTES", 7 * 301 * 4 + 3)
    runner = load(settings).runner
    at_once: list[int] = []
    compute = runner._decoder.compute_logits

    def count(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        at_once.append(len(rows))
        logits: npt.NDArray[np.float32] = compute(rows)
        return logits

    monkeypatch.setattr(runner._decoder, "compute_logits", count)
    assert runner.execute(plan) == whole
    assert max(at_once) == 7
    assert sum(at_once) == 49 + 1
    rated = whole.prompt_logprobs[RequestId("a")]
    assert [entry.token_id for entry in rated] == tokens[1:]
    assert all(len(entry.top) == 5 for entry in rated)


NO_TORCH = """
import os, sys
from pathlib import Path
from kvpilot_engine.kernels.compile_cache import prepare_compile_cache
prepare_compile_cache(os.environ)
from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.execution.loading import load_engine
from kvpilot_engine.execution.settings import ExecutionSettings

settings = ExecutionSettings(model=Path(sys.argv[1]), num_threads=2, num_blocks_override=10, step_target_s=0.1)
engine = load_engine(settings, CacheSettings(), SchedulerSettings(max_num_batched_tokens=64, max_num_seqs=8))
sampling = SamplingParams(max_tokens=1, temperature=0.0)
plan = SchedulerOutput((ScheduledSequence(RequestId("a"), 0, (TokenId(3),), (BlockId(1),), sampling, 0, True),))
assert engine.runner.execute(plan).sampled
print("torch" in sys.modules, engine.budget.process_base_bytes < 250 << 20)
"""


def test_a_token_is_generated_without_torch(tiny_folder: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", NO_TORCH, str(tiny_folder)], capture_output=True, text=True, check=False, timeout=100
    )
    assert answer.stdout.strip() == "False True", answer.stderr


def test_auto_keeps_keys_and_values_as_the_machine_multiplies_them() -> None:
    assert choose_kv_dtype("auto", 16, has_tiles=True) is KVDtype.BFLOAT16
    assert choose_kv_dtype("auto", 24, has_tiles=True) is KVDtype.FLOAT16
    assert choose_kv_dtype("auto", 16, has_tiles=False) is KVDtype.FLOAT16
    assert choose_kv_dtype("float16", 16, has_tiles=True) is KVDtype.FLOAT16


@pytest.mark.parametrize(
    ("block_size", "has_tiles", "message"),
    [
        (16, False, "kv_cache_dtype is bfloat16: on cpu that needs a processor with AMX"),
        (24, True, "block_size is 24; with kv_cache_dtype bfloat16 it must be a multiple of 16"),
    ],
)
def test_bfloat16_that_can_not_be_is_refused(block_size: int, has_tiles: bool, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        choose_kv_dtype("bfloat16", block_size, has_tiles=has_tiles)
