"""The Lease that keeps two operators from writing to the same objects.

Holding it is a fact about time, not a flag: it ends by itself when it could not be renewed, also when this process was
frozen meanwhile. Others' clocks are never compared with ours: a foreign holder counts as gone when its record has not
changed for its own duration, measured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from kvpilot_operator.core.ports import Clock, KubeApi, Manifest
from kvpilot_operator.core.resources import LEASES
from kvpilot_operator.errors import OperatorError

logger = logging.getLogger(__name__)


class LeaseGuard:
    """Renews in the background; `is_held` is asked before every pass."""

    def __init__(
        self, api: KubeApi, clock: Clock, *, namespace: str, name: str, identity: str, duration_s: float
    ) -> None:
        self._api = api
        self._clock = clock
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._held_until = float("-inf")
        self._foreign_record: tuple[object, ...] = ()
        self._foreign_since = 0.0
        self._warned_of = ""
        self._task: asyncio.Task[None] | None = None
        self._acquired = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self._clock.monotonic() < self._held_until

    async def wait_until_held(self) -> None:
        await self._acquired.wait()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kvpilot lease")

    async def stop(self) -> None:
        """Stop renewing, and give the lease back so that a successor need not wait for it to run out."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self.is_held:
            self._held_until = float("-inf")
            with contextlib.suppress(OperatorError):
                await self._release()

    async def _run(self) -> None:
        while True:
            try:
                await self.renew()
            except OperatorError as error:
                logger.warning("the lease was not renewed: %s", error)
            await asyncio.sleep(self._duration_s / 3)

    async def renew(self) -> bool:
        """One try to take or keep the lease; whether it is ours now."""
        was_held = self.is_held
        started = self._clock.monotonic()
        lease = await self._api.get_lease(self._namespace, self._name)
        if lease is None:
            await self._api.create_lease(self._manifest({}, transitions=0))
        else:
            spec = lease.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            if holder not in ("", self._identity) and not self._has_run_out(spec):
                self._held_until = float("-inf")
                self._acquired.clear()
                if holder != self._warned_of:
                    self._warned_of = holder
                    logger.warning("another operator holds the lease: %s; this one does not write", holder)
                return False
            transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
            await self._api.update_lease(self._manifest(lease["metadata"], transitions=transitions))
        # Counted from before the request: the answer may have taken long.
        self._held_until = started + self._duration_s
        self._acquired.set()
        self._warned_of = ""
        if not was_held:
            logger.info("holding the lease %s/%s as %s", self._namespace, self._name, self._identity)
        return True

    def _has_run_out(self, spec: dict[str, Any]) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = self._clock.monotonic()
        if record != self._foreign_record:
            self._foreign_record, self._foreign_since = record, now
            return False
        return now - self._foreign_since >= float(spec.get("leaseDurationSeconds") or self._duration_s)

    async def _release(self) -> None:
        lease = await self._api.get_lease(self._namespace, self._name)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            lease["spec"]["holderIdentity"] = ""
            await self._api.update_lease({**lease, "apiVersion": LEASES.api_version, "kind": LEASES.kind})

    def _manifest(self, metadata: dict[str, Any], *, transitions: int) -> Manifest:
        now = self._clock.now().isoformat(timespec="microseconds").replace("+00:00", "Z")
        kept = {key: metadata[key] for key in ("resourceVersion", "uid", "labels", "annotations") if key in metadata}
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"namespace": self._namespace, "name": self._name, **kept},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._duration_s)),
                "renewTime": now,
                "acquireTime": now,
                "leaseTransitions": transitions,
            },
        }
