"""Large files of a checkpoint, put into the hub's cache in a way that outlives a killed process: the next one goes on.

The hub's library writes to a file of a random name and begins anew after a kill. Here the unfinished file is named by
the SHA-256 of what it will hold, so whoever comes next knows what it is; one process at a time writes it, by a lock.
What has no SHA-256 (small files), what another process is downloading, and what plain HTTP doesn't serve is left to the
library.

Invariant: a file gets its final name only when its content is what the name says.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from kvpilot_engine.errors import ModelNotFoundError

_LOG = logging.getLogger(__name__)
MAX_SIZE = 50_000_000_000
"""The hub serves larger ones by its own protocol only."""
NUM_AT_ONCE = 4
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file that the hub keeps by the hash of its content."""

    sha256: str
    size: int


def unfinished_path(blobs: Path, sha256: str) -> Path:
    return blobs / f"{sha256}.partial"


def unfinished_bytes(blobs: Path, files: Mapping[str, LargeFile]) -> int:
    """Bytes that earlier processes brought and the next one need not fetch."""
    found = {file.sha256: unfinished_path(blobs, file.sha256) for file in files.values()}
    return sum(path.stat().st_size for path in found.values() if path.is_file())


class BlobFetcher:
    """Fetches the files of one revision; errors are the library's, or ModelNotFoundError for what arrived wrong."""

    def __init__(self, repository: str, revision: str, blobs: Path, *, bar: type[Any]) -> None:
        from huggingface_hub.utils._headers import build_hf_headers

        self._repository = repository
        self._revision = revision
        self._blobs = blobs
        self._bar = bar
        self._headers = build_hf_headers(library_name="kvpilot")

    def fetch(self, files: Mapping[str, LargeFile]) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="download") as pool:
            # list: raises the first error
            list(pool.map(self._fetch, files, files.values()))

    def _fetch(self, name: str, file: LargeFile) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        blob, unfinished = self._blobs / file.sha256, unfinished_path(self._blobs, file.sha256)
        if blob.exists() or file.size > MAX_SIZE:
            return
        url = hf_hub_url(self._repository, name, revision=self._revision)
        found = get_hf_file_metadata(url, headers=dict(self._headers))
        if found.etag != file.sha256:
            return
        headers = dict(self._headers)
        if urlsplit(found.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # somebody else's server
        with unfinished.open("ab") as target:
            try:
                fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            if blob.exists():
                unfinished.unlink(missing_ok=True)
                return
            self._go_on(name, file, target, found.location, headers)
            target.flush()
            self._check(name, file, unfinished)
            unfinished.rename(blob)

    def _go_on(self, name: str, file: LargeFile, target: BinaryIO, url: str, headers: dict[str, str]) -> None:
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get

        if target.tell() > file.size:
            target.truncate(0)
            target.seek(0)
        start = target.tell()
        if start == file.size:
            return
        if start:
            _LOG.info("%s of %s: going on at byte %d of %d", name, self._repository, start, file.size)
        try:
            http_get(url, target, resume_size=start, headers=headers, displayed_filename=name, tqdm_class=self._bar)
        except HfHubHTTPError as error:
            if error.response.status_code == _RANGE_NOT_SATISFIABLE:
                target.truncate(0)  # the server's file ends before ours does
            raise

    def _check(self, name: str, file: LargeFile, unfinished: Path) -> None:
        size = unfinished.stat().st_size
        problem = f"a size of {size} bytes, the hub says {file.size}" if size != file.size else None
        if problem is None:
            with unfinished.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            problem = f"SHA-256 {digest}, the hub says {file.sha256}" if digest != file.sha256 else None
        if problem is not None:
            unfinished.unlink()
            raise ModelNotFoundError(f"{self._repository}: {name} arrived with {problem}; it was removed")
