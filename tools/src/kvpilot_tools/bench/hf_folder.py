"""Writes a Hugging Face folder from a GGUF file of the Llama architecture, for peers that read nothing else.

Weights are dequantized and stored as bfloat16, the undoing of GGUF's order of rows in q and k included. Not a general
converter: only what the benchmarks' model needs, and everything else is an error. Needs neither torch nor transformers.
Invariant: the folder's tokenizer gives the ids that our own gives for the GGUF file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from kvpilot_engine.text.gguf_tokenizer import PRE_TOKENIZERS

_CONTROL, _USER_DEFINED = 3, 4
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_hf_folder(model: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files; the folder appears whole or not at all."""
    reader = gguf.GGUFReader(model)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{model.name}: general.architecture is {architecture!r}; only 'llama' can be written")
    config = build_config(metadata, is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {}
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        tensors[canonical_name(tensor.name)] = to_bfloat16(unpermute(tensor.name, values, config))
    write_bfloat16_safetensors(partial / "model.safetensors", tensors)
    _write_json(partial / "config.json", config)
    _write_tokenizer(partial, metadata)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def build_config(metadata: Mapping[str, Any], *, is_tied: bool) -> dict[str, object]:
    """The config.json of the model that the metadata describes."""
    hidden, heads = int(metadata["llama.embedding_length"]), int(metadata["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "vocab_size": int(metadata["llama.vocab_size"]),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "torch_dtype": "bfloat16",
    }


def canonical_name(name: str) -> str:
    """The name that transformers gives a tensor of a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def unpermute(name: str, values: npt.NDArray[np.float32], config: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """GGUF interleaves the two halves of each rotary head in q and k; undo it, leave others as they are."""
    if name.endswith(".attn_q.weight"):
        heads = int(config["num_attention_heads"])
    elif name.endswith(".attn_k.weight"):
        heads = int(config["num_key_value_heads"])
    else:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; the result holds its bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return (rounded >> 16).astype(np.uint16)


def write_bfloat16_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """Write the bits of bfloat16 tensors; by hand, since the library's numpy half knows no bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        end = offset + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for bits in tensors.values():
            file.write(np.ascontiguousarray(bits).tobytes())


def _write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    kind = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    backend = tokenizers.Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=kind.ignores_merges)
    )
    backend.pre_tokenizer = kind.build()
    backend.decoder = ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=token_type == _CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[int(metadata[key])]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(metadata["llama.context_length"]),
            **named,
        },
    )


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
