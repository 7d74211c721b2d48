"""Write an object's status when it is worth it, and post the events that its change is worth.

What status says is computed in `core.status`. Invariant: a status is written at the version that it was decided from or
not at all, and its events come after it, so that a lost write is told of by the pass that repeats it.
"""

from __future__ import annotations

import logging
from datetime import datetime

from kvpilot_operator.core.api_status import LLMDeploymentStatus, parse_status
from kvpilot_operator.core.events import compute_events
from kvpilot_operator.core.merge_patch import build_merge_patch
from kvpilot_operator.core.ports import Clock, KubeApi, Manifest
from kvpilot_operator.core.status import compute_invalid_status, should_write
from kvpilot_operator.event_poster import EventPoster

logger = logging.getLogger(__name__)


class StatusWriter:
    """One for the whole operator."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._events = EventPoster(api, clock)

    async def write(self, manifest: Manifest, new: LLMDeploymentStatus, version: str, now: datetime) -> None:
        """`manifest` is the object as it was read; `version` is newer when it has been written since."""
        previous = parse_status(manifest.get("status"))
        if not should_write(previous, new, now):
            return
        patch = build_merge_patch(manifest.get("status") or {}, new.to_dict())
        if not patch:
            return
        metadata = manifest["metadata"]
        await self._api.patch_status(metadata["namespace"], metadata["name"], patch, version)
        await self._events.post(manifest, compute_events(previous, new))

    async def write_invalid(self, manifest: Manifest, message: str, now: datetime) -> None:
        """The spec can't be understood or carried out: that and nothing else changes."""
        previous, metadata = parse_status(manifest.get("status")), manifest["metadata"]
        new = compute_invalid_status(previous, metadata.get("generation", 0), message, now)
        if new.conditions != previous.conditions:
            key = f"{metadata['namespace']}/{metadata['name']}"
            logger.warning("invalid: %s", message, extra={"key": key, "event": "InvalidSpec"})
        await self.write(manifest, new, str(metadata["resourceVersion"]), now)
