"""The operator's own pulse: every known object is due once a tick, and everything is listed anew now and then.

The list is what finds objects whose creation or deletion no watch told. Decides nothing and reads no object's content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Sequence

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.ports import Clock, KubeApi, Manifest
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS
from kvpilot_operator.errors import OperatorError
from kvpilot_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_RELIST_RETRY_S = 30.0


class Ticker:
    """Start it after the queue; stop it before."""

    def __init__(
        self,
        api: KubeApi,
        queue: WorkQueue,
        clock: Clock,
        *,
        namespaces: Sequence[str],
        tick_s: float,
        resync_s: float,
        on_listed: Callable[[Manifest], None] = lambda _manifest: None,
    ) -> None:
        self._api = api
        self._queue = queue
        self._clock = clock
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._tick_s = tick_s
        self._resync_s = resync_s
        self._on_listed = on_listed
        self._keys: set[NamespacedName] = set()
        self._last_tick = clock.monotonic()
        self._next_resync = self._last_tick
        self._task: asyncio.Task[None] | None = None

    @property
    def num_objects(self) -> int:
        return len(self._keys)

    def compute_age(self) -> float:
        """Seconds since the last tick."""
        return self._clock.monotonic() - self._last_tick

    def remember(self, key: NamespacedName) -> None:
        self._keys.add(key)

    def forget(self, key: NamespacedName) -> None:
        self._keys.discard(key)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvpilot tick")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def tick(self) -> None:
        """One pulse. Objects are spread over the tick, so that their engines aren't all read at once."""
        self._last_tick = self._clock.monotonic()
        if self._last_tick >= self._next_resync:
            self._next_resync = self._last_tick + self._resync_s
            try:
                await self.resync()
            except OperatorError as error:
                self._next_resync = self._last_tick + min(_RELIST_RETRY_S, self._resync_s)
                logger.warning("listing everything failed: %s", error)
        for key in self._keys:
            self._queue.add_unless_backing_off(key, delay_s=compute_offset(key) * self._tick_s)

    async def resync(self) -> None:
        """List all objects. Those that are gone get one last pass, which finds out and forgets them."""
        listed: set[NamespacedName] = set()
        for namespace in self._namespaces:
            for manifest in await self._api.list_objects(LLM_DEPLOYMENTS, namespace):
                listed.add(NamespacedName(manifest["metadata"]["namespace"], manifest["metadata"]["name"]))
                self._on_listed(manifest)
        for key in self._keys - listed:
            self._queue.add(key)
        self._keys = listed

    async def _run(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(self._tick_s)


def compute_offset(key: NamespacedName) -> float:
    """Where in the tick an object is due, 0..1: the same for ever, and spread evenly over objects."""
    return zlib.crc32(str(key).encode()) / 2**32
