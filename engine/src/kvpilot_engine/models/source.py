"""Where a model comes from: a local path, or a repository of the Hugging Face hub, made a local path.

Both processes use it, so it imports no torch. Invariant: what comes back is a path that exists; everything else is a
ModelNotFoundError whose reason says whether access or the model is what is missing. Tokens never appear in a message.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.checkpoint_files import choose_gguf
from kvpilot_engine.models.hub import HubReference, download

_HUB_PREFIX = "hf://"
_FILE_PREFIX = "file://"
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<variant>[\w.-]+))?"
_HUB_SOURCE = re.compile(_REPOSITORY + r"(?:@(?P<revision>[\w./-]+))?")
_BARE_NAME = re.compile(_REPOSITORY)


def parse_source(source: str) -> Path | HubReference:
    """hf://REPO[:VARIANT][@REVISION], file:///PATH, a local path, or REPO[:VARIANT] where no such path exists."""
    if source.startswith(_FILE_PREFIX):
        return Path(unquote(source.removeprefix(_FILE_PREFIX)))
    if source.startswith(_HUB_PREFIX):
        match = _HUB_SOURCE.fullmatch(source.removeprefix(_HUB_PREFIX))
        if match is None:
            raise ModelNotFoundError(
                f"{source} names no repository; it must be hf://OWNER/NAME[:VARIANT][@REVISION], "
                "such as hf://owner/model, hf://owner/model@main or hf://owner/model-GGUF:Q4_K_M"
            )
        return HubReference(match["repository"], revision=match["revision"], variant=match["variant"])
    path = Path(source)
    match = _BARE_NAME.fullmatch(source)
    if path.exists() or match is None:
        return path
    return HubReference(match["repository"], variant=match["variant"])


def resolve_model(source: str, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """The local file or folder of a model; downloads from the hub (resuming, with progress in the log) where needed.

    `revision` is used where the source names none. A model that is in the cache already starts without the network.
    """
    found = parse_source(source)
    if isinstance(found, HubReference):
        folder, variant = download(found, found.revision or revision, cache_dir), found.variant
        return find_checkpoint(folder, variant=variant)
    if not found.exists():
        raise ModelNotFoundError(f"{found} does not exist")
    return find_checkpoint(found)


def find_checkpoint(path: Path, *, variant: str | None = None) -> Path:
    """The GGUF file of a folder (the first part of a split one); a Hugging Face folder or a file as it is."""
    if not path.is_dir() or (variant is None and (path / "config.json").is_file()):
        return path
    names = [file.relative_to(path).as_posix() for file in path.rglob("*.gguf")]
    return path / choose_gguf(names, variant=variant, origin=str(path))[0]
