"""Lease, tick and watch monitor: who may write, what is looked at when nothing happens, when silence is too long."""

from __future__ import annotations

import asyncio

import pytest

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.resources import LEASES, LLM_DEPLOYMENTS
from kvpilot_operator.errors import TransientError
from kvpilot_operator.lease import LeaseGuard
from kvpilot_operator.testing import FakeKubeApi, ManualClock, make_object
from kvpilot_operator.ticker import Ticker, compute_offset
from kvpilot_operator.watch_monitor import WatchMonitor
from kvpilot_operator.work_queue import WorkQueue


def make_guard(api: FakeKubeApi, clock: ManualClock, identity: str) -> LeaseGuard:
    return LeaseGuard(api, clock, namespace="kvpilot", name="lease", identity=identity, duration_s=30)


async def test_the_second_operator_waits_and_takes_over_when_the_first_is_silent() -> None:  # C7
    api, clock = FakeKubeApi(), ManualClock()
    first, second = make_guard(api, clock, "one"), make_guard(api, clock, "two")
    assert await first.renew()
    assert not await second.renew()
    clock.advance(20)
    assert await first.renew()
    clock.advance(20)
    assert first.is_held
    assert not await second.renew()  # the record moved since it was seen
    clock.advance(31)
    assert not first.is_held  # by the clock alone: it may have been frozen
    assert await second.renew()
    assert not await first.renew()


async def test_never_both_hold_the_lease() -> None:  # C7
    api, clock = FakeKubeApi(), ManualClock()
    guards = [make_guard(api, clock, name) for name in ("one", "two")]
    for step in range(200):
        guard = guards[(step // 17) % 2]
        await guard.renew()
        assert not all(g.is_held for g in guards)
        clock.advance(4)


async def test_a_lease_that_is_given_back_is_free_at_once() -> None:
    api, clock = FakeKubeApi(), ManualClock()
    first, second = make_guard(api, clock, "one"), make_guard(api, clock, "two")
    await first.renew()
    await first.stop()
    assert not first.is_held
    assert await second.renew()


async def test_an_operator_that_can_not_renew_stops_holding() -> None:
    api, clock = FakeKubeApi(), ManualClock()
    guard = make_guard(api, clock, "one")
    await guard.renew()
    api.errors["get", "leases"] = TransientError("away")
    with pytest.raises(TransientError):
        await guard.renew()
    assert guard.is_held
    clock.advance(31)
    assert not guard.is_held


async def test_the_lease_tells_who_holds_it_and_how_often_it_changed_hands() -> None:
    api, clock = FakeKubeApi(), ManualClock()
    await make_guard(api, clock, "one").renew()
    second = make_guard(api, clock, "two")
    await second.renew()
    clock.advance(31)
    await second.renew()
    lease = api.peek(LEASES, "kvpilot", "lease")
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == "two"
    assert lease["spec"]["leaseTransitions"] == 1
    assert lease["spec"]["leaseDurationSeconds"] == 30


class Passes:
    def __init__(self) -> None:
        self.keys: list[NamespacedName] = []
        self._called = asyncio.Event()

    async def __call__(self, key: NamespacedName) -> float | None:
        self.keys.append(key)
        self._called.set()
        return None

    async def wait_for(self, *keys: NamespacedName) -> None:
        async with asyncio.timeout(5):
            while not set(keys) <= set(self.keys):
                self._called.clear()
                await self._called.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_objects_whose_creation_no_watch_told_are_found_and_vanished_ones_get_a_last_pass() -> None:  # C9
    api, clock, passes = FakeKubeApi(), ManualClock(), Passes()
    queue = WorkQueue(passes)
    queue.start()
    ticker = Ticker(api, queue, clock, namespaces=("team-a",), tick_s=0.0, resync_s=600)
    api.put(make_object("a"))
    api.put(make_object("other", namespace="team-b"))
    await ticker.tick()
    assert ticker.num_objects == 1
    api.put(make_object("b"))
    api.remove(LLM_DEPLOYMENTS, "team-a", "a")
    clock.advance(599)
    await ticker.tick()
    assert ticker.num_objects == 1
    clock.advance(1)
    await ticker.tick()
    await passes.wait_for(NamespacedName("team-a", "a"), NamespacedName("team-a", "b"))
    passes.keys.clear()
    await ticker.tick()
    await passes.wait_for(NamespacedName("team-a", "b"))
    await settle()
    assert passes.keys == [NamespacedName("team-a", "b")]
    await queue.stop()


async def test_a_list_that_fails_is_tried_again_soon_and_the_tick_goes_on() -> None:
    api, clock = FakeKubeApi(), ManualClock()
    queue = WorkQueue(Passes())
    ticker = Ticker(api, queue, clock, namespaces=(), tick_s=5, resync_s=600)
    api.put(make_object("a"))
    api.errors["list", "llmdeployments"] = TransientError("away")
    await ticker.tick()
    assert ticker.num_objects == 0
    assert ticker.compute_age() == 0
    del api.errors["list", "llmdeployments"]
    clock.advance(30)
    assert ticker.compute_age() == 30
    await ticker.tick()
    assert ticker.num_objects == 1


def test_objects_are_spread_over_the_tick() -> None:
    offsets = sorted(compute_offset(NamespacedName("ns", f"model-{number}")) for number in range(1000))
    assert 0 <= offsets[0] < 0.01
    assert 0.99 < offsets[-1] < 1
    assert abs(offsets[500] - 0.5) < 0.05


def at(version: int, name: str = "a", kind: str = "Pod") -> dict[str, object]:
    return {"kind": kind, "metadata": {"namespace": "ns", "name": name, "resourceVersion": str(version)}}


def test_a_quiet_cluster_is_no_silence() -> None:
    clock = ManualClock()
    monitor = WatchMonitor(clock, kinds=frozenset({"Pod"}))
    monitor.saw(at(5))
    clock.advance(10_000)
    assert monitor.compute_silence() == 0


def test_a_write_of_ours_that_the_watch_does_not_deliver_is_silence() -> None:
    clock = ManualClock()
    monitor = WatchMonitor(clock, kinds=frozenset({"Pod"}))
    monitor.saw(at(5))
    monitor.expect(at(7))
    clock.advance(20)
    monitor.expect(at(9))
    clock.advance(20)
    monitor.saw(at(7))  # late, and not yet all of it
    assert monitor.compute_silence() == 40
    monitor.saw(at(9))
    assert monitor.compute_silence() == 0


def test_what_came_before_it_was_expected_or_was_deleted_is_not_waited_for() -> None:
    clock = ManualClock()
    monitor = WatchMonitor(clock, kinds=frozenset({"Pod"}))
    monitor.saw(at(8))
    monitor.expect(at(8))
    monitor.expect(at(3, "b"))
    monitor.expect(at(3, "c", kind="Event"))
    monitor.saw_deleted(at(4, "b"))
    clock.advance(100)
    assert monitor.compute_silence() == 0
