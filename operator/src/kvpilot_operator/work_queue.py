"""A coalescing queue of object keys: many causes, one pass at a time for each object, retries with a growing delay.

kopf never retries an `on.event` handler, so this does. A key that is added while it is being worked on is worked on
once more afterwards, never twice at the same time; adding it ten times costs one pass. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from kvpilot_operator.core.keys import NamespacedName

Work = Callable[[NamespacedName], Awaitable[float | None]]
"""Returns after how many seconds the key is due again by itself, or None."""
OnError = Callable[[NamespacedName, Exception, float], None]
"""Called with the error of a pass and the delay until the next try."""
RetryAfter = Callable[[Exception], float | None]


def compute_backoff(failures: int, *, base_s: float, max_s: float) -> float:
    """Delay before try `failures + 1`: doubling from `base_s`, at most `max_s`."""
    return min(max_s, base_s * 2.0 ** min(failures - 1, 30))


class WorkQueue:
    """Start and stop it inside one event loop; `add` may be called from that loop only."""

    def __init__(
        self,
        work: Work,
        *,
        workers: int = 8,
        max_keys: int = 100_000,
        base_backoff_s: float = 1.0,
        max_backoff_s: float = 300.0,
        retry_after: RetryAfter = lambda _error: None,
        on_error: OnError = lambda _key, _error, _delay: None,
    ) -> None:
        """`max_keys` bounds memory: beyond it new keys are dropped, and the next tick brings them back."""
        self._work = work
        self._num_workers = workers
        self._max_keys = max_keys
        self._base_backoff_s = base_backoff_s
        self._max_backoff_s = max_backoff_s
        self._retry_after = retry_after
        self._on_error = on_error
        self._queue: deque[NamespacedName] = deque()
        self._queued: set[NamespacedName] = set()
        self._running: set[NamespacedName] = set()
        self._dirty: set[NamespacedName] = set()
        self._failures: dict[NamespacedName, int] = {}
        self._timers: dict[NamespacedName, asyncio.TimerHandle] = {}
        self._available = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []
        self.num_dropped = 0

    def __len__(self) -> int:
        """Keys that wait for a worker."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_delayed(self) -> int:
        return len(self._timers)

    def add(self, key: NamespacedName) -> None:
        """Work on `key` soon: something changed, so a pause after an error ends here."""
        self._cancel_timer(key)
        if key in self._running:
            self._dirty.add(key)
        elif key not in self._queued:
            if len(self._queued) >= self._max_keys:
                self.num_dropped += 1
                return
            self._queued.add(key)
            self._queue.append(key)
            self._available.release()

    def add_unless_backing_off(self, key: NamespacedName, *, delay_s: float = 0.0) -> None:
        """The tick's way: nothing changed, so an object that fails keeps its pause."""
        if key not in self._failures and key not in self._queued and key not in self._running:
            self.add_after(key, delay_s)

    def add_after(self, key: NamespacedName, delay_s: float) -> None:
        """Work on `key` in `delay_s` seconds at the latest; the earlier of two delays holds."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(delay_s, self._on_timer, key)

    def forget(self, key: NamespacedName) -> None:
        """The object is gone: no timer and no failure count stay behind."""
        self._cancel_timer(key)
        self._failures.pop(key, None)

    def start(self) -> None:
        if self._tasks:
            raise RuntimeError("a queue starts once")
        self._tasks = [
            asyncio.create_task(self._run_worker(), name=f"kvpilot worker {index}")
            for index in range(self._num_workers)
        ]

    async def stop(self) -> None:
        """Cancel the workers, in the middle of a pass if need be: a pass is safe to be cut short anywhere."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def _run_worker(self) -> None:
        while True:
            await self._available.acquire()
            key = self._queue.popleft()
            self._queued.discard(key)
            self._running.add(key)
            try:
                await self._run_once(key)
            finally:
                self._running.discard(key)
                if key in self._dirty:
                    self._dirty.discard(key)
                    self.add(key)

    async def _run_once(self, key: NamespacedName) -> None:
        try:
            due_s = await self._work(key)
        except Exception as error:  # noqa: BLE001 - the one place that turns any failure of a pass into a retry
            failures = self._failures.get(key, 0) + 1
            self._failures[key] = failures
            backoff_s = compute_backoff(failures, base_s=self._base_backoff_s, max_s=self._max_backoff_s)
            delay_s = max(backoff_s, self._retry_after(error) or 0.0)
            self._on_error(key, error, delay_s)
            self.add_after(key, delay_s)
        else:
            self._failures.pop(key, None)
            if due_s is not None:
                self.add_after(key, due_s)

    def _on_timer(self, key: NamespacedName) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: NamespacedName) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
