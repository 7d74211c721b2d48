"""Downloads a checkpoint from the Hugging Face hub into its cache: the wanted files only, resumed, with progress.

Not for which files make a checkpoint (checkpoint_files.py). The hub's library does the protocol; here its errors become
ours, and a model that is in the cache starts without the network. Tokens never appear in a message.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.checkpoint_files import choose_files
from kvpilot_engine.models.hub_blobs import BlobFetcher, LargeFile, unfinished_bytes

_LOG = logging.getLogger(__name__)
ACCESS_DENIED = "ModelAccessDenied"
PROGRESS_S = 5.0
"""Seconds between two lines about a running download."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """One checkpoint on the hub."""

    repository: str
    revision: str | None = None
    variant: str | None = None
    """Which GGUF file of several, by a part of its name: Q4_K_M."""

    def __str__(self) -> str:
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.repository}{variant}" + (f"@{self.revision}" if self.revision else "")


def download(reference: HubReference, revision: str | None, cache_dir: Path | None) -> Path:
    """The folder of a revision that holds the checkpoint's files.

    Raises ModelNotFoundError; its reason is ModelAccessDenied where a token is what is missing.
    """
    # the engine tells nobody that it runs
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # imported here: a second of imports that local models don't need
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is the transport's own
        HfHubHTTPError,
        HTTPError,
    )

    named = HubReference(reference.repository, revision, reference.variant)
    cache = cache_dir or Path(constants.HF_HUB_CACHE)
    try:
        info = HfApi(library_name="kvpilot").model_info(reference.repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        chosen = choose_files(sizes, variant=reference.variant, origin=str(named))
        blobs = _blobs_folder(reference.repository, cache)
        large = {
            file.rfilename: LargeFile(file.lfs.sha256, file.lfs.size)
            for file in info.siblings or ()
            if file.lfs is not None and file.rfilename in chosen
        }
        missing = _missing_bytes(reference.repository, info.sha, {name: sizes[name] for name in chosen}, cache)
        missing = max(0, missing - unfinished_bytes(blobs, large))
        if missing:
            _check_space(cache, missing, named)
            _LOG.info("downloading %s: %s in %d files", named, _format_bytes(missing), len(chosen))
        with _log_progress(named, blobs, missing):
            BlobFetcher(reference.repository, info.sha or "main", blobs, bar=_silent_bar()).fetch(large)
            folder = snapshot_download(
                reference.repository,
                revision=revision,
                cache_dir=cache,
                allow_patterns=chosen,
                tqdm_class=_silent_bar(),
            )
        _check_sizes(Path(folder), {name: sizes[name] for name in chosen}, named)
        return Path(folder)
    except ModelNotFoundError:
        raise
    except (HfHubHTTPError, HTTPError, OSError) as error:
        cached = _find_cached(named, cache)
        if cached is None:
            raise _explain(error, named) from error
        _LOG.warning("%s comes from the cache: the hub could not be asked (%s)", named, _first_line(error))
        return cached


def _find_cached(named: HubReference, cache: Path) -> Path | None:
    """The folder of an earlier, complete download; None when there is none."""
    from huggingface_hub import snapshot_download

    def find(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                named.repository,
                revision=named.revision,
                cache_dir=cache,
                local_files_only=True,
                allow_patterns=patterns,
            )
        )

    try:
        # no file is asked for yet: only then can a folder be found whose other variants were never downloaded
        folder = find(["."])
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        return find(choose_files(names, variant=named.variant, origin=str(named)))
    except (OSError, ModelNotFoundError):
        return None


def _explain(error: Exception, named: HubReference) -> ModelNotFoundError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    source = error
    # without a cached copy the library wraps what the server said
    while not isinstance(source, HfHubHTTPError) and isinstance(source.__cause__, Exception):
        source = source.__cause__
    if isinstance(source, GatedRepoError):
        return _access_denied(f"access to {named} has to be granted on the hub, to the owner of the token")
    if isinstance(source, RevisionNotFoundError):
        return ModelNotFoundError(f"{named.repository} has no revision {named.revision}")
    if isinstance(source, RepositoryNotFoundError):
        # the hub answers the same for a private repository without a valid token
        return _access_denied(f"{named} does not exist, or the token (HF_TOKEN) gives no access to it")
    if isinstance(source, HfHubHTTPError):
        status = source.response.status_code
        if status in (401, 403):
            return _access_denied(f"the hub refused access to {named} (HTTP {status}); check the token (HF_TOKEN)")
        return ModelNotFoundError(f"the hub answered HTTP {status} for {named}")
    if isinstance(error, OfflineModeIsEnabled):
        return ModelNotFoundError(f"{named} is not in the cache, and HF_HUB_OFFLINE forbids to download it")
    return ModelNotFoundError(f"{named} is not in the cache and could not be downloaded: {_first_line(error)}")


def _access_denied(message: str) -> ModelNotFoundError:
    error = ModelNotFoundError(message)
    error.reason = ACCESS_DENIED
    return error


def _missing_bytes(repository: str, commit: str | None, sizes: dict[str, int], cache: Path) -> int:
    """Bytes of the files that the cache does not hold yet."""
    from huggingface_hub import try_to_load_from_cache

    return sum(
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(repository, name, cache_dir=cache, revision=commit), str)
    )


def _check_space(cache: Path, missing: int, named: HubReference) -> None:
    folder = next(place for place in (cache, *cache.parents) if place.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelNotFoundError(
            f"{named} needs {_format_bytes(missing)} in {cache}, where {_format_bytes(free)} are free"
        )


def _check_sizes(folder: Path, sizes: dict[str, int], named: HubReference) -> None:
    """The library compares with what the file server says; a proxy in between may have it wrong for good."""
    for name, size in sizes.items():
        file = folder / name
        actual = file.stat().st_size
        if size and actual != size:
            file.resolve().unlink()  # or it would be taken for complete from now on
            raise ModelNotFoundError(
                f"{named}: {name} arrived with a size of {actual} bytes, the hub says {size}; it was removed"
            )


def _blobs_folder(repository: str, cache: Path) -> Path:
    return cache / f"models--{repository.replace('/', '--')}" / "blobs"


@contextmanager
def _log_progress(named: HubReference, blobs: Path, missing: int) -> Iterator[None]:
    """Log how far a download is every PROGRESS_S, by what has arrived on disk."""
    if not missing:
        yield
        return
    before, started, done = _size(blobs), time.monotonic(), threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_S):
            arrived = max(0, _size(blobs) - before)
            speed = arrived / (time.monotonic() - started)
            _LOG.info(
                "downloading %s: %d %% of %s, %s/s",
                named, min(100, 100 * arrived // missing), _format_bytes(missing), _format_bytes(speed),
            )  # fmt: skip

    watcher = threading.Thread(target=watch, daemon=True, name="download-progress")
    watcher.start()
    try:
        yield
        _LOG.info("downloaded %s in %.0f s", named, time.monotonic() - started)
    finally:
        done.set()
        watcher.join()


def _size(folder: Path) -> int:
    total = 0
    for file in folder.iterdir() if folder.is_dir() else ():
        try:
            # blocks: unfinished files may be sparse
            total += min(file.stat().st_size, file.stat().st_blocks * 512)
        except FileNotFoundError:
            continue  # renamed when it was complete
    return total


def _silent_bar() -> type[Any]:
    """A bar for a library that insists on one: in a pod's log it would be one endless line."""
    from tqdm import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]  # the library has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return SilentBar


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
