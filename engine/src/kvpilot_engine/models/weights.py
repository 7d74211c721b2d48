"""Reading checkpoints: tensors by their canonical Hugging Face names, as float32, from GGUF or safetensors.

Not for where a model comes from (source.py) nor for what is built from it. Invariant: whatever the format, a name
yields the same numbers in the same layout; the formats' own conventions (GGUF's permuted q and k) end here.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.models.config import LlamaConfig, parse_gguf_config, parse_hf_config
from kvpilot_engine.models.gguf_reader import TensorReader


class WeightSource(Protocol):
    """An opened checkpoint. Closing it drops its file mappings; tensors already read stay valid."""

    @property
    def config(self) -> LlamaConfig: ...

    def read(self, name: str) -> Tensor:
        """The tensor of that canonical name as float32, owned by the caller; SettingsError when it is not there."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_weights(path: Path) -> WeightSource:
    """Open a GGUF file, a folder with exactly one, or a Hugging Face safetensors folder."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return SafetensorsWeights(path)
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GGUFWeights(found[0])
        names = ", ".join(file.name for file in found) or "none"
        raise ModelNotFoundError(f"{path} holds neither config.json nor exactly one .gguf file (found: {names})")
    if path.is_file() and path.suffix == ".gguf":
        return GGUFWeights(path)
    raise ModelNotFoundError(f"{path} is neither a model folder nor a .gguf file")


_GGUF_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PREFIX = "model.layers."


def gguf_name(name: str) -> str:
    """The GGUF tensor name of a canonical one."""
    if not name.startswith(_LAYER_PREFIX):
        return _GGUF_GLOBAL[name]
    index, rest = name.removeprefix(_LAYER_PREFIX).split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_GGUF_LAYER[module]}.{kind}"


class GGUFWeights:
    """A GGUF file of the llama architecture; every quantization that the gguf package can undo."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader: TensorReader | None = TensorReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise SettingsError([f"{path}: not a readable GGUF file ({error})"]) from error
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise SettingsError([f"{path}: tensor token_embd.weight is missing"])
        self._config = parse_gguf_config(
            {
                name: self._reader.fields[name].contents()
                for name in self._reader.fields
                if not name.startswith("tokenizer.")
            },
            vocab_size=int(embedding.shape[1]),  # GGUF lists dimensions innermost first
            has_output_head="output.weight" in self._tensors,
            has_attention_bias="blk.0.attn_q.bias" in self._tensors,
            origin=path.name,
        )
        if "rope_freqs.weight" in self._tensors:
            raise SettingsError([f"{path.name}: rope scaling by rope_freqs.weight is not supported"])

    @property
    def config(self) -> LlamaConfig:
        return self._config

    def read(self, name: str) -> Tensor:
        tensor = self._tensors.get(gguf_name(name))
        if tensor is None:
            raise SettingsError([f"{self._path.name}: tensor {gguf_name(name)} is missing"])
        try:
            array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise SettingsError(
                [f"{self._path.name}: quantization {kind} of {tensor.name} is not supported"]
            ) from error
        if ".q_proj." in name:
            array = _unpermute(array, self._config.num_heads)
        elif ".k_proj." in name:
            array = _unpermute(array, self._config.num_kv_heads)
        return torch.tensor(array)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._reader = None


def _unpermute(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's interleaving of each head's rotated pairs, so that half rotation applies."""
    rows, rest = array.shape[0], array.shape[1:]
    return array.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


class SafetensorsWeights:
    """A Hugging Face folder: config.json and one or many safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError([f"{folder / 'config.json'}: not JSON ({error})"]) from error
        self._config = parse_hf_config(config, origin="config.json")
        self._files: dict[str, AbstractContextManager[Any]] = {}
        self._file_of = self._index()

    @property
    def config(self) -> LlamaConfig:
        return self._config

    def read(self, name: str) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise SettingsError([f"{self._folder}: tensor {name} is missing"])
        tensor: Tensor = self._open(file).get_tensor(name)
        if not tensor.is_floating_point():
            raise SettingsError([f"{file}: tensor {name} has type {tensor.dtype}; quantized weights are not supported"])
        return tensor.to(torch.float32, copy=True).contiguous()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.__exit__(kind, error, traceback)
        self._files.clear()

    def _index(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            missing = sorted({file for file in weight_map.values() if not (self._folder / file).is_file()})
            if missing:
                raise ModelNotFoundError(f"{self._folder}: {', '.join(missing)} missing")
            return weight_map
        files = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{self._folder} holds no .safetensors file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 - not a mapping

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                opened = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise SettingsError([f"{file}: not a readable safetensors file ({error})"]) from error
            self._files[file] = opened
        return self._files[file]
