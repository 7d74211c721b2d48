"""Where a model comes from: a local path, or a repository of the Hugging Face hub, made a local path.

Both processes use it, so it imports no torch. Invariant: what comes back is a path that exists; everything else is a
ModelNotFoundError whose reason says whether access or the model is what is missing. Tokens never appear in a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from kvpilot_engine.errors import ModelNotFoundError

ACCESS_DENIED = "ModelAccessDenied"

_HUB_PREFIX = "hf://"
_FILE_PREFIX = "file://"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt")
_GGUF_FILES = ("*.gguf",)


@dataclass(frozen=True, slots=True)
class HubReference:
    repository: str
    revision: str | None = None


def parse_source(source: str) -> Path | HubReference:
    """hf://REPO[@REVISION], file:///PATH, a local path, or REPO/NAME of the hub where no such path exists."""
    if source.startswith(_FILE_PREFIX):
        return Path(unquote(source.removeprefix(_FILE_PREFIX)))
    if source.startswith(_HUB_PREFIX):
        repository, _, revision = source.removeprefix(_HUB_PREFIX).partition("@")
        if not _REPOSITORY.fullmatch(repository):
            raise ModelNotFoundError(
                f"{source} names no repository; it must be hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
            )
        return HubReference(repository, revision or None)
    path = Path(source)
    if path.exists() or not _REPOSITORY.fullmatch(source):
        return path
    return HubReference(source)


def resolve_model(source: str, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """The local file or folder of a model; downloads from the hub (resuming, with progress on stderr) where needed.

    `revision` is used where the source names none. A model that is in the cache already starts without the network.
    """
    found = parse_source(source)
    if isinstance(found, HubReference):
        return _download(found, found.revision or revision, cache_dir)
    if not found.exists():
        raise ModelNotFoundError(f"{found} does not exist")
    return find_checkpoint(found)


def find_checkpoint(path: Path) -> Path:
    """The GGUF file of a folder that holds exactly one and no config.json; any other path as it is."""
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise ModelNotFoundError(f"{path} holds neither config.json nor exactly one .gguf file (found: {names})")
        return files[0]
    return path


def _download(reference: HubReference, revision: str | None, cache_dir: Path | None) -> Path:
    # imported here: a second of imports that local models don't need
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is the transport's own
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = reference.repository + (f"@{revision}" if revision else "")
    try:
        folder = Path(
            snapshot_download(
                reference.repository,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=[*_WANTED_FILES, *_GGUF_FILES],
            )
        )
    except GatedRepoError as error:
        raise _access_denied(f"access to {name} has to be granted on the hub, to the owner of the token") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{reference.repository} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        # the hub answers the same for a private repository without a valid token
        raise _access_denied(f"{name} does not exist, or the token (HF_TOKEN) gives no access to it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise _access_denied(
                f"the hub refused access to {name} (HTTP {status}); check the token (HF_TOKEN)"
            ) from error
        raise ModelNotFoundError(f"the hub answered HTTP {status} for {name}") from error
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        # without a cached copy the hub's library wraps what the server said
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
            raise _access_denied(f"the hub refused access to {name} (HTTP {cause.response.status_code})") from error
        raise ModelNotFoundError(f"{name} is not in the cache and could not be downloaded: {error}") from error
    return find_checkpoint(folder)


def _access_denied(message: str) -> ModelNotFoundError:
    error = ModelNotFoundError(message)
    error.reason = ACCESS_DENIED
    return error
