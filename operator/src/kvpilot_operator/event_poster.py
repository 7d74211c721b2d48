"""Post Kubernetes Events, the same one again as a higher count of the first. Best effort: a lost event loses nothing.

Which changes are worth an event is decided in `core.events`; the state of the world is in status, never here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from kvpilot_operator.core.events import ObjectEvent
from kvpilot_operator.core.naming import content_hash
from kvpilot_operator.core.ports import Clock, KubeApi, Manifest
from kvpilot_operator.core.resources import EVENTS
from kvpilot_operator.core.timestamps import format_time
from kvpilot_operator.errors import ConflictError, OperatorError

logger = logging.getLogger(__name__)

COMPONENT = "kvpilot-operator"

_MAX_COUNTS = 4096


class EventPoster:
    """Knows how often each event was posted; a restart begins to count anew."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def post(self, about: Manifest, events: Sequence[ObjectEvent]) -> None:
        """`about` is the object as it was read: it names what the events are about."""
        for event in events:
            try:
                await self._post(about, event)
            except OperatorError as error:
                logger.warning("event %s was not posted: %s", event.reason, error)

    async def _post(self, about: Manifest, event: ObjectEvent) -> None:
        metadata = about["metadata"]
        namespace, now = metadata["namespace"], format_time(self._clock.now())
        name = f"{metadata['name']}.{content_hash([metadata['uid'], event.reason, event.message])}"
        count = self._counts.get((namespace, name), 0) + 1
        again = {"count": max(2, count), "lastTimestamp": now}
        try:
            if count == 1:
                await self._api.create_event(_build_event(about, event, name, now))
            else:
                await self._api.patch_event(namespace, name, again)
        except ConflictError:
            if count == 1:  # posted before our last start
                count = 2
                await self._api.patch_event(namespace, name, again)
            else:  # the API server keeps events for an hour only
                count = 1
                await self._api.create_event(_build_event(about, event, name, now))
        self._counts[namespace, name] = count
        self._counts.move_to_end((namespace, name))
        while len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)


def _build_event(about: Manifest, event: ObjectEvent, name: str, now: str) -> Manifest:
    metadata = about["metadata"]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"namespace": metadata["namespace"], "name": name},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": str(event.type),
        "reason": event.reason,
        "action": event.action,
        "message": event.message,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }
