"""Opening a checkpoint, whatever its format: the one entrance of models/.

Not for where a model comes from (source.py) nor for what is built from it. Imports no torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.models.checkpoint import Checkpoint
from kvpilot_engine.models.checkpoint_files import choose_gguf
from kvpilot_engine.models.gguf_store import GGUFStore
from kvpilot_engine.models.hf_config import HFConfig
from kvpilot_engine.models.registry import find_gguf_architecture, find_hf_architecture
from kvpilot_engine.models.safetensors_store import SafetensorsStore
from kvpilot_engine.models.weight_source import WeightSource

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")


def open_weights(path: Path) -> WeightSource:
    """Open a GGUF file (of one in parts: the first), a folder with exactly one model in GGUF, or a Hugging Face folder.

    ModelNotFoundError when files are missing; SettingsError when it is a model that we can't run.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            return _open_safetensors(path)
        names = [file.name for file in path.glob("*.gguf")]
        return _open_gguf([path / name for name in choose_gguf(names, variant=None, origin=str(path))])
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(gguf_parts(path))
    raise ModelNotFoundError(f"{path} is neither a model folder nor a .gguf file")


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model whose first or only file is this one."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    if int(part["number"]) != 1:
        first = f"{part['stem']}-00001-of-{part['total']}.gguf"
        number, total = int(part["number"]), int(part["total"])
        raise ModelNotFoundError(f"{path} is part {number} of {total}; name the first, {first}")
    siblings = path.parent.glob(f"*-of-{part['total']}.gguf")
    names = [file.name for file in siblings if file.name.startswith(f"{part['stem']}-")]
    return [path.parent / name for name in choose_gguf(names, variant=None, origin=str(path.parent))]


def _open_gguf(parts: list[Path]) -> WeightSource:
    store = GGUFStore(parts)
    header = store.header
    architecture = find_gguf_architecture(header.architecture, origin=store.origin)
    assert architecture.parse_gguf is not None
    return Checkpoint(
        architecture.parse_gguf(header),
        store,
        architecture.gguf_names,
        interleaved_rotary=architecture.gguf_interleaves_rotary,
    )


def _open_safetensors(folder: Path) -> WeightSource:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError([f"{path}: not JSON ({error})"]) from error
    if not isinstance(values, dict):
        raise SettingsError([f"{path}: not a JSON object"])
    whole = HFConfig(values, origin=path.name)
    architecture = find_hf_architecture(whole.strings("architectures"), origin=path.name)
    # multimodal models describe their text part within
    values |= {**whole.mapping("text_config"), "architectures": values["architectures"]}
    config = HFConfig(values, origin=path.name, defaults=architecture.hf_defaults)
    config.refuse_what_no_architecture_has()
    decoder = architecture.parse_hf(config)
    store = SafetensorsStore(folder)
    variants = architecture.hf_names
    names = next((v for v in variants if f"{v.outside['embedding']}.weight" in store.shapes), variants[0])
    return Checkpoint(decoder, store, names, norm_offset=architecture.hf_norm_offset)
