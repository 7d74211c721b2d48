"""Which files of a folder or repository make up one checkpoint. Pure: names in, names out.

model.safetensors, model-00001-of-00002.safetensors    with config.json: the weights
name-Q4_K_M.gguf                                       one variant
name-Q8_0-00001-of-00003.gguf …                        one variant in parts
mmproj-….gguf                                          a vision projector, no language model
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from kvpilot_engine.errors import ModelNotFoundError

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Patterns of what a Hugging Face folder holds beside its weights."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_NOT_A_MODEL = re.compile(r"(^|[-_.])(mmproj|imatrix)", re.IGNORECASE)


def choose_files(names: Iterable[str], *, variant: str | None, origin: str) -> list[str]:
    """The files of a repository to download: its safetensors, or one GGUF variant.

    Raises ModelNotFoundError that lists the variants when there are several and none was asked for.
    """
    all_names = sorted(names)
    text = [name for name in all_names if any(PurePosixPath(name).match(pattern) for pattern in TEXT_FILES)]
    # the root only: subfolders hold other formats of the same weights (original/, onnx/)
    text = [name for name in text if "/" not in name]
    weights = [name for name in all_names if name.endswith(".safetensors") and "/" not in name]
    if variant is None and weights and "config.json" in text:
        return text + weights
    if not any(name.endswith(".gguf") for name in all_names):
        kinds = sorted({PurePosixPath(name).suffix for name in all_names if _looks_like_weights(name)})
        found = f"only {', '.join(kinds)} weights" if kinds else "no weights"
        raise ModelNotFoundError(f"{origin} holds {found}; readable are .safetensors with a config.json, and .gguf")
    return text + choose_gguf(all_names, variant=variant, origin=origin)


def choose_gguf(names: Iterable[str], *, variant: str | None, origin: str) -> list[str]:
    """The one GGUF model among the names that matches the variant, in the order of its parts.

    Raises ModelNotFoundError when there is none, more than one, or a part is missing.
    """
    models = _group_parts(name for name in names if name.endswith(".gguf") and not _NOT_A_MODEL.search(_base(name)))
    if not models:
        raise ModelNotFoundError(f"{origin} holds neither config.json nor a .gguf file")
    chosen = dict(models)
    if variant is not None:
        wanted = re.compile(rf"(^|[-_.]){re.escape(variant)}($|[-.])", re.IGNORECASE)
        chosen = {stem: files for stem, files in models.items() if wanted.search(_base(stem))}
    if len(chosen) != 1:
        listed = ", ".join(sorted(_base(stem) for stem in (chosen or models)))
        asked = f"none of its .gguf files is {variant}" if variant and not chosen else "it holds several .gguf files"
        raise ModelNotFoundError(
            f"{origin}: {asked} ({listed}); name one, such as hf://OWNER/NAME:Q4_K_M, or give the file's path"
        )
    ((stem, files),) = chosen.items()
    _check_parts(stem, files, origin)
    return files


def _group_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Names without part numbers → their files, parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        part = _PART.fullmatch(name)
        models.setdefault(part["stem"] if part else name.removesuffix(".gguf"), []).append(name)
    return models


def _check_parts(stem: str, files: list[str], origin: str) -> None:
    part = _PART.fullmatch(files[0])
    if part is None:
        return
    wanted = [f"{stem}-{number:05}-of-{part['total']}.gguf" for number in range(1, int(part["total"]) + 1)]
    missing = [_base(name) for name in wanted if name not in files]
    if missing:
        raise ModelNotFoundError(f"{origin}: {', '.join(missing)} missing")


def _looks_like_weights(name: str) -> bool:
    return PurePosixPath(name).suffix in {".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".safetensors"}


def _base(name: str) -> str:
    return PurePosixPath(name).name
