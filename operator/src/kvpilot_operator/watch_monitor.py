"""Whether the watches still speak: what was written or listed must come back through the watch.

A quiet cluster sends nothing, so silence alone says nothing. A change that is known from elsewhere (the answer to our
own write, a fresh list) and has not arrived within the limit does. Keeps one number per object, and repairs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpilot_operator.core.ports import Clock


class _Ref(NamedTuple):
    kind: str
    namespace: str
    name: str


class WatchMonitor:
    """Fed by the handlers (`saw`, `saw_deleted`) and by whoever knows better (`expect`)."""

    def __init__(self, clock: Clock, *, kinds: frozenset[str]) -> None:
        """Objects of other kinds are not watched and are ignored here."""
        self._clock = clock
        self._kinds = kinds
        self._seen: dict[_Ref, int] = {}
        self._expected: dict[_Ref, tuple[int, float]] = {}

    def saw(self, manifest: Mapping[str, Any]) -> None:
        """The watch delivered this object."""
        ref, version = _identify(manifest)
        self._seen[ref] = max(version, self._seen.get(ref, 0))
        expected = self._expected.get(ref)
        if expected is not None and expected[0] <= self._seen[ref]:
            del self._expected[ref]

    def saw_deleted(self, manifest: Mapping[str, Any]) -> None:
        ref, _ = _identify(manifest)
        self._seen.pop(ref, None)
        self._expected.pop(ref, None)

    def expect(self, manifest: Mapping[str, Any]) -> None:
        """The API server holds this version: the watch must deliver it, or a later one."""
        ref, version = _identify(manifest)
        if ref.kind not in self._kinds or version <= self._seen.get(ref, 0):
            return
        since = self._expected[ref][1] if ref in self._expected else self._clock.monotonic()
        self._expected[ref] = (version, since)

    def compute_silence(self) -> float:
        """Seconds that the oldest expected change is overdue by; 0 when nothing is awaited."""
        if not self._expected:
            return 0.0
        return self._clock.monotonic() - min(since for _, since in self._expected.values())


def _identify(manifest: Mapping[str, Any]) -> tuple[_Ref, int]:
    metadata = manifest.get("metadata", {})
    ref = _Ref(str(manifest.get("kind", "")), metadata.get("namespace", ""), metadata.get("name", ""))
    version = str(metadata.get("resourceVersion", ""))
    # Every server so far counts them up; one that does not is simply not monitored.
    return ref, int(version) if version.isdigit() else 0
