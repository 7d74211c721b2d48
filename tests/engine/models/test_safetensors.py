"""Hugging Face folders: one file or shards, three types, and clear refusals of what we can't read or run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.models.hf_config import HFConfig
from kvpilot_engine.models.registry import find_hf_architecture
from kvpilot_engine.models.weight_source import StorageType
from kvpilot_engine.models.weights import open_weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def draw_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    weights = {"model.embed_tokens.weight": draw(31, 24), "model.norm.weight": draw(24)}
    for index in range(2):
        prefix = f"model.layers.{index}"
        for name, width in (("q", 24), ("k", 8), ("v", 8), ("o", 24)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = draw(width, 24)
        weights[f"{prefix}.mlp.gate_proj.weight"] = draw(40, 24)
        weights[f"{prefix}.mlp.up_proj.weight"] = draw(40, 24)
        weights[f"{prefix}.mlp.down_proj.weight"] = draw(24, 40)
        weights[f"{prefix}.input_layernorm.weight"] = draw(24)
        weights[f"{prefix}.post_attention_layernorm.weight"] = draw(24)
    return weights


def write_folder(
    folder: Path,
    changes: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})), encoding="utf-8")
    chosen = draw_weights() if weights is None else weights
    if shards == 1:
        save_file(chosen, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        names = sorted(chosen)[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: chosen[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_that_were_written(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in draw_weights().items()}
    with open_weights(write_folder(tmp_path / "m", weights=weights, shards=shards)) as source:
        for ours, theirs in (
            ("embedding.weight", "model.embed_tokens.weight"),
            ("norm.weight", "model.norm.weight"),
            ("layers.1.k.weight", "model.layers.1.self_attn.k_proj.weight"),
            ("layers.0.mlp_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ):
            read = source.read(ours)
            assert read.dtype == np.float32
            assert read.flags.owndata
            assert read.flags.writeable
            assert (read == weights[theirs].float().numpy()).all()
        matrix = source.read_stored("layers.1.k.weight")
    assert (
        matrix.storage
        is {
            torch.float32: StorageType.F32,
            torch.float16: StorageType.F16,
            torch.bfloat16: StorageType.BF16,
        }[dtype]
    )
    assert (matrix.num_rows, matrix.num_columns) == (8, 24)
    stored = weights["model.layers.1.self_attn.k_proj.weight"].view(torch.uint8).numpy()
    assert (matrix.data == stored).all()


def test_fused_projections_are_split_by_rows(make_reference: Any) -> None:
    reference = make_reference("phi3")
    fused = reference.weights["model.layers.1.self_attn.qkv_proj.weight"].numpy()
    gate_up = reference.weights["model.layers.1.mlp.gate_up_proj.weight"].numpy()
    with open_weights(reference.folder) as source:
        parts = {"q": fused[:96], "k": fused[96:128], "v": fused[128:], "gate": gate_up[:160], "up": gate_up[160:]}
        for name, expected in parts.items():
            assert (source.read(f"layers.1.{name}.weight") == expected).all()
            matrix = source.read_stored(f"layers.1.{name}.weight")
            assert (matrix.num_rows, matrix.num_columns) == expected.shape
            assert (matrix.data.view(np.float32) == expected).all()


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_the_text_part_of_a_multimodal_gemma_is_read(tmp_path: Path, make_reference: Any, prefix: str) -> None:
    reference = make_reference("gemma3")
    text = json.loads((reference.folder / "config.json").read_text(encoding="utf-8"))
    text |= {"tie_word_embeddings": True, "architectures": None}
    changes = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    weights = {
        f"{prefix}.{name.removeprefix('model.')}": tensor.contiguous()
        for name, tensor in reference.weights.items()
        if name != "lm_head.weight"
    }
    weights["vision_tower.layers.0.weight"] = torch.ones(3)
    (tmp_path / "config.json").write_text(json.dumps(changes), encoding="utf-8")
    save_file(weights, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as source, open_weights(reference.folder) as plain:
        assert source.config.layers == plain.config.layers
        for name in ("norm.weight", "layers.2.q_norm.weight", "layers.0.up.weight"):
            assert (source.read(name) == plain.read(name)).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"MambaForCausalLM is not supported \(supported: LlamaForCausalLM.*Phi3",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; it must be a list of strings"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be an object"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a positive number"),
        ({"num_attention_heads": 100}, "head_dim is 0; it must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling yarn is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization awq"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64}},
            "short_factor has 1 entries.* 2",
        ),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"head_dim": 3}, "3 rotated elements in a head of 3"),
        ({"head_dim": 8}, r"q_proj\.weight has size 24 × 24; the configuration says 48 × 24"),
        ({"num_hidden_layers": 1}, r"no tensor model\.layers\.1\..* and 4 more"),
        ({"attention_bias": True}, r"q_proj\.bias.* and 3 more is missing"),
    ],
)
def test_what_we_cannot_run_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder = write_folder(tmp_path / "m", changes)
    with pytest.raises(SettingsError, match=named):
        open_weights(folder)


def test_layer_types_that_we_don_t_compute_are_named(tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "head_dim": 4}
    for types, named in (
        (["full_attention", "chunked_attention"], "chunked_attention"),
        (["full_attention"], "1 entries"),
    ):
        folder = write_folder(tmp_path / "m", changes | {"layer_types": types})
        with pytest.raises(SettingsError, match=named):
            open_weights(folder)


def test_missing_tensors_and_missing_shards_are_named(tmp_path: Path) -> None:
    weights = draw_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(SettingsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_weights(write_folder(tmp_path / "a", weights=weights))
    folder = write_folder(tmp_path / "b", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00003"):
        open_weights(folder)
    folder = write_folder(tmp_path / "c")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no \.safetensors file"):
        open_weights(folder)


def test_a_type_that_is_no_float_is_named_when_it_is_read(tmp_path: Path) -> None:
    weights = draw_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    with (
        open_weights(write_folder(tmp_path / "m", weights=weights)) as source,
        pytest.raises(
            SettingsError, match=r"model\.norm\.weight has type I8; supported in safetensors: F32, F16, BF16"
        ),
    ):
        source.read("norm.weight")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(SettingsError, match=r"model\.safetensors: not a readable safetensors file"):
        open_weights(folder)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model at all, and longer than a header would be")
    with pytest.raises(SettingsError, match=r"a\.gguf"):
        open_weights(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFoundError, match="neither"):
        open_weights(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SettingsError, match="not a JSON object"):
        open_weights(tmp_path)


def test_weights_are_read_without_torch() -> None:
    program = (
        "import sys, kvpilot_engine.models.weights, kvpilot_engine.models.rotary_tables; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_older_and_newer_spellings_of_a_gemma_3_are_the_same_model() -> None:
    """Before transformers 5 the rotations were three keys, layers a period, and defaults were not written."""
    values = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 301,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "sliding_window": 24,
    }
    old = values | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6}
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    new = values | {
        "layer_types": types,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    gemma3 = find_hf_architecture(["Gemma3ForCausalLM"], origin="a")
    older, newer = (
        gemma3.parse_hf(HFConfig(spelling, origin="a", defaults=gemma3.hf_defaults)) for spelling in (old, new)
    )
    assert older == newer
    assert [layer.window for layer in older.layers] == ([24] * 5 + [None]) * 2
    assert {layer.rope.theta for layer in older.layers if layer.window} == {10000.0}
