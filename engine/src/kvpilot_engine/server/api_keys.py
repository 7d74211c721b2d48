"""Who may use /v1: one of several keys, compared in constant time.

Keys are kept and compared as digests, so that neither the time of a comparison nor a dump of this object tells a key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web

from kvpilot_engine.errors import SettingsError

_GUARDED = "/v1"


class ApiKeys:
    def __init__(self, keys: Iterable[str]) -> None:
        """No keys: everybody may."""
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, request: web.Request) -> None:
        """Raise HTTPUnauthorized unless the path is open or the request has a key. Preflights carry none by design."""
        if not self._digests or not _is_guarded(request.path):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(given.strip())
        # All keys are compared, whichever fits: the time tells nothing about their order either.
        fits = [secrets.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(fits):
            raise web.HTTPUnauthorized(text="the API key is missing or wrong")


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key a line; empty lines and lines that begin with # say nothing. Raises SettingsError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"--api-key-file {path}: {error}"]) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise SettingsError([f"--api-key-file {path} holds no key"])
    return keys


def _is_guarded(path: str) -> bool:
    return path == _GUARDED or path.startswith(f"{_GUARDED}/")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
