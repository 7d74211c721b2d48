"""GGUF files as llama.cpp's converter lays them out give the bits of the same weights in safetensors.

Names come from the gguf package's own table, quantization from its quantizers: neither from the code under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.models.weights import open_weights

Describe = Callable[[GGUFWriter], None]

LLAMA3_ORIGINAL, LLAMA3_FACTOR = 32, 8.0


def describe_gemma(writer: GGUFWriter) -> None:
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(24)


def describe_gemma2(writer: GGUFWriter) -> None:
    describe_gemma(writer)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)


def describe_gemma3(writer: GGUFWriter) -> None:
    describe_gemma(writer)
    writer.add_final_logit_softcapping(9.0)
    writer.add_rope_freq_base(1000000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])


def describe_linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def describe_llama3(writer: GGUFWriter) -> None:
    """llama.cpp keeps this scaling as one divisor for each frequency."""
    factors = []
    for exponent in range(0, 16, 2):
        wavelength = 2 * math.pi * 10000.0 ** (exponent / 16)
        if wavelength < LLAMA3_ORIGINAL / 4.0:
            factors.append(1.0)
        elif wavelength > LLAMA3_ORIGINAL / 1.0:
            factors.append(LLAMA3_FACTOR)
        else:
            smooth = (LLAMA3_ORIGINAL / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / LLAMA3_FACTOR + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def describe_long(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(256 / 64) / math.log(64)))
    writer.add_tensor("rope_factors_short.weight", np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5], dtype=np.float32))
    writer.add_tensor("rope_factors_long.weight", np.array([1.0, 1.5, 2.0, 3.0, 4.0, 5.0], dtype=np.float32))


FILES: dict[str, tuple[gguf.MODEL_ARCH, Describe]] = {
    "llama": (gguf.MODEL_ARCH.LLAMA, lambda writer: writer.add_rope_freq_base(50000.0)),
    "llama3-scaling": (gguf.MODEL_ARCH.LLAMA, describe_llama3),
    "llama-linear": (gguf.MODEL_ARCH.LLAMA, describe_linear),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, lambda _: None),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, lambda writer: writer.add_key_length(16)),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, describe_gemma2),
    "gemma3": (gguf.MODEL_ARCH.GEMMA3, describe_gemma3),
    "phi3": (gguf.MODEL_ARCH.PHI3, lambda writer: writer.add_sliding_window(24)),
    "phi3-long": (gguf.MODEL_ARCH.PHI3, describe_long),
}


def interleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What the converter does to q and k of Llama: each head's halves, element by element."""
    return np.ascontiguousarray(weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2)).reshape(
        weight.shape
    )


def write_gguf(
    path: Path, architecture: gguf.MODEL_ARCH, weights: dict[str, npt.NDArray[np.float32]], describe: Describe
) -> dict[str, npt.NDArray[np.float32]]:
    """Matrices as Q8_0 or Q4_0, turn by turn; returns the weights that are left of them, by Hugging Face name."""
    name_of = gguf.MODEL_ARCH_NAMES[architecture]
    names = gguf.get_tensor_name_map(architecture, 3)
    heads = 6 if name_of in ("qwen2", "phi3") else 4
    writer = GGUFWriter(path, name_of)
    writer.add_context_length(256)
    writer.add_embedding_length(96)
    writer.add_block_count(3)
    writer.add_feed_forward_length(160)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5 if name_of == "phi3" else 1e-6)
    writer.add_rope_dimension_count(12 if describe is describe_long else 16)
    if name_of == "llama":
        writer.add_key_length(16)
        writer.add_value_length(16)
    describe(writer)
    left: dict[str, npt.NDArray[np.float32]] = {}
    for index, (name, array) in enumerate(sorted(weights.items())):
        module, kind = name.rsplit(".", 1)
        gguf_name = f"{names.get_name(module)}.{kind}"
        left[name] = array
        turned = array
        if name_of == "llama" and (".q_proj." in name or ".k_proj." in name):
            turned = interleave(array, heads if ".q_proj." in name else 2)
        if name_of.startswith("gemma") and name.endswith("norm.weight"):
            turned = array + np.float32(1.0)
        if array.ndim == 1:
            writer.add_tensor(gguf_name, turned)
            continue
        kind_of_blocks = GGMLQuantizationType.Q4_0 if index % 2 else GGMLQuantizationType.Q8_0
        writer.add_tensor(gguf_name, quantize(turned, kind_of_blocks), raw_dtype=kind_of_blocks)
        # rows are quantized one by one, so their order doesn't matter
        left[name] = dequantize(quantize(array, kind_of_blocks), kind_of_blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def untie(weights: dict[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    """Without the second name of a tied embedding."""
    embedding = weights["model.embed_tokens.weight"]
    return {
        name: tensor.numpy()
        for name, tensor in weights.items()
        if name != "lm_head.weight" or tensor.data_ptr() != embedding.data_ptr()
    }


@pytest.mark.parametrize("name", FILES)
def test_gguf_gives_the_bits_of_the_same_weights_in_safetensors(
    name: str, make_reference: Any, open_paged: Any, tmp_path: Path
) -> None:
    reference = make_reference(name)
    architecture, describe = FILES[name]
    left = write_gguf(tmp_path / "m.gguf", architecture, untie(reference.weights), describe)
    folder = tmp_path / "same"
    folder.mkdir()
    values = json.loads((reference.folder / "config.json").read_text(encoding="utf-8"))
    if name == "qwen2":
        # GGUF knows no windows of Qwen 2
        values |= {"use_sliding_window": False, "layer_types": None}
    if name in ("gemma2", "gemma3"):
        # nor a scale that is not the head size's
        values |= {"query_pre_attn_scalar": 16}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(
        {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in left.items()}, folder / "m.safetensors"
    )
    expected = open_paged(folder).compute(reference.prompt)
    ours = open_paged(tmp_path / "m.gguf").compute(reference.prompt)
    if name == "llama3-scaling":
        # the divisors are float32
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("describe", "named"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope scaling yarn"),
        (lambda writer: writer.add_expert_count(8), "mixture-of-experts"),
        (lambda writer: writer.add_tensor("blk.0.ffn_up.bias", np.zeros(160, np.float32)), r"blk\.0\.ffn_up\.bias"),
        (lambda writer: writer.add_array("llama.attention.head_count_kv", [2, 2, 1]), "head_count_kv"),
    ],
    ids=["yarn", "experts", "mlp bias", "heads by layer"],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    describe: Describe, named: str, make_reference: Any, tmp_path: Path
) -> None:
    weights = untie(make_reference("llama-linear").weights)
    write_gguf(tmp_path / "m.gguf", gguf.MODEL_ARCH.LLAMA, weights, describe)
    with pytest.raises(SettingsError, match=named):
        open_weights(tmp_path / "m.gguf")
