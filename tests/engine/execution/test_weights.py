"""The same numbers through every format, and clear refusals of what we can't run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.execution.kv_cache_tensors import KVCacheTensors
from kvpilot_engine.execution.torch_model_runner import TorchModelRunner
from kvpilot_engine.models.architecture import GGUF_NAMES, HF_NAMES
from kvpilot_engine.models.torch_decoder import load_torch_decoder
from kvpilot_engine.models.weights import open_weights


def compute_logits(path: Path) -> torch.Tensor:
    """Logits after twenty fixed tokens."""
    with open_weights(path) as source:
        model = load_torch_decoder(source, max_positions=64)
    runner = TorchModelRunner(model, KVCacheTensors(model.config, num_blocks=4, block_size=16), HostMemory())
    tokens = tuple(TokenId(token) for token in range(20))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    sequence = ScheduledSequence(RequestId("a"), 0, tokens, (BlockId(1), BlockId(2)), sampling, 0, samples=True)
    return runner.compute_logits(SchedulerOutput((sequence,)))


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's conversion: interleave the halves of each head."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    module, kind = name.rsplit(".", 1)
    for ours, theirs in HF_NAMES.outside.items():
        if theirs == module:
            return f"{GGUF_NAMES.outside[ours]}.{kind}"
    index, module = module.removeprefix("model.layers.").split(".", 1)
    ours = next(ours for ours, theirs in HF_NAMES.inside.items() if theirs == module)
    return f"blk.{index}.{GGUF_NAMES.inside[ours]}.{kind}"


def write_gguf(path: Path, weights: dict[str, torch.Tensor], *, architecture: str = "llama", scaling: str = "") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(96)
    writer.add_block_count(2)
    writer.add_feed_forward_length(160)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    for name, tensor in weights.items():
        array = tensor.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            array = permute(array, 6 if ".q_proj." in name else 2)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("attention_bias", "tied"), [(False, True), (True, False)])
def test_safetensors_shards_and_gguf_give_the_same_logits(
    write_tiny_folder: Callable[..., Path],
    tiny_weights: Callable[..., dict[str, torch.Tensor]],
    tmp_path: Path,
    attention_bias: bool,
    tied: bool,
) -> None:
    weights = tiny_weights(attention_bias=attention_bias, tied=tied)
    if attention_bias:
        # GGUF's permutation of a bias has one column less
        weights = {name: tensor for name, tensor in weights.items() if ".k_proj.bias" not in name}
        weights |= {f"model.layers.{i}.self_attn.k_proj.bias": torch.zeros(32) for i in range(2)}
    changes: dict[str, object] = {"attention_bias": attention_bias, "tie_word_embeddings": tied}
    write_gguf(tmp_path / "tiny.gguf", weights)
    expected = compute_logits(write_tiny_folder(changes, weights))
    assert torch.equal(compute_logits(write_tiny_folder(changes, weights, shards=3)), expected)
    assert torch.equal(compute_logits(tmp_path / "tiny.gguf"), expected)
    assert torch.equal(compute_logits(tmp_path), expected)
    assert expected.std() > 0.1


def test_half_precision_checkpoints_are_read_as_float32(
    write_tiny_folder: Callable[..., Path], tiny_weights: Callable[..., dict[str, torch.Tensor]]
) -> None:
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_weights().items()}
    with open_weights(write_tiny_folder(weights=halves)) as source:
        read = source.read("norm.weight")
    assert read.dtype == np.float32
    assert (read == halves["model.norm.weight"].float().numpy()).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_we_cannot_run_is_named(
    write_tiny_folder: Callable[..., Path], changes: dict[str, object], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        open_weights(write_tiny_folder(changes))


def test_other_gguf_architectures_and_scalings_are_named(
    tiny_weights: Callable[..., dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", tiny_weights(), architecture="gptneox")
    with pytest.raises(SettingsError, match="gptneox"):
        open_weights(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", tiny_weights(), scaling="yarn")
    with pytest.raises(SettingsError, match="yarn"):
        open_weights(tmp_path / "b.gguf")


def test_missing_tensors_and_missing_shards_are_named(
    write_tiny_folder: Callable[..., Path], tiny_weights: Callable[..., dict[str, torch.Tensor]]
) -> None:
    weights = tiny_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(SettingsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        compute_logits(write_tiny_folder(weights=weights))
    folder = write_tiny_folder(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00003"):
        open_weights(folder)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model at all, and longer than a header would be")
    with pytest.raises(SettingsError, match=r"a\.gguf"):
        open_weights(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFoundError, match="neither"):
        open_weights(tmp_path / "nothing")
