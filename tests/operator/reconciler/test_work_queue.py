"""The queue: one pass at a time for each key, nothing lost, nothing doubled, growing pauses after errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.work_queue import WorkQueue, compute_backoff

A, B = NamespacedName("ns", "a"), NamespacedName("ns", "b")


class Work:
    """Counts passes; holds them while closed; fails as often as told."""

    def __init__(self) -> None:
        self.calls: list[NamespacedName] = []
        self.errors: list[tuple[NamespacedName, Exception, float]] = []
        self.running = 0
        self.max_running_of_one_key = 0
        self.failures = 0
        self.due_s: float | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._running: dict[NamespacedName, int] = {}

    async def __call__(self, key: NamespacedName) -> float | None:
        self.calls.append(key)
        self._running[key] = self._running.get(key, 0) + 1
        self.max_running_of_one_key = max(self.max_running_of_one_key, self._running[key])
        self.running += 1
        try:
            await self.gate.wait()
            if self.failures > 0:
                self.failures -= 1
                raise RuntimeError("again")
        finally:
            self._running[key] -= 1
            self.running -= 1
        return self.due_s

    def on_error(self, key: NamespacedName, error: Exception, delay_s: float) -> None:
        self.errors.append((key, error, delay_s))


@pytest.fixture
async def work() -> Work:
    return Work()


@pytest.fixture
async def queue(work: Work) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(work, workers=4, base_backoff_s=0.01, max_backoff_s=0.02, on_error=work.on_error)
    queue.start()
    yield queue
    await queue.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a condition over several counters has no event
            await asyncio.sleep(0.001)


async def test_ten_additions_cost_one_pass(work: Work, queue: WorkQueue) -> None:
    for _ in range(10):
        queue.add(A)
    await until(lambda: work.calls == [A] and not work.running)


async def test_a_key_that_changes_while_it_is_worked_on_gets_one_more_pass_and_never_two_at_once(
    work: Work, queue: WorkQueue
) -> None:
    work.gate.clear()
    queue.add(A)
    await until(lambda: work.running == 1)
    for _ in range(5):
        queue.add(A)
    queue.add(B)
    await until(lambda: work.running == 2)
    work.gate.set()
    await until(lambda: work.calls.count(A) == 2 and not work.running and len(queue) == 0)
    assert work.max_running_of_one_key == 1


async def test_a_slow_object_does_not_hold_up_the_others(work: Work, queue: WorkQueue) -> None:  # C15
    work.gate.clear()
    queue.add(A)
    await until(lambda: work.running == 1)
    done: list[NamespacedName] = []

    async def quick(key: NamespacedName) -> float | None:
        done.append(key)
        return None

    queue._work = quick
    queue.add(B)
    await until(lambda: done == [B])
    work.gate.set()


async def test_errors_are_retried_with_a_growing_pause_until_they_end(work: Work, queue: WorkQueue) -> None:  # C10
    work.failures = 3
    queue.add(A)
    await until(lambda: len(work.calls) == 4)
    assert [delay for _, _, delay in work.errors] == [0.01, 0.02, 0.02]


async def test_a_pause_that_the_error_asks_for_is_kept(work: Work) -> None:
    queue = WorkQueue(work, retry_after=lambda _: 30.0, base_backoff_s=0.01, on_error=work.on_error)
    queue.start()
    work.failures = 1
    queue.add(A)
    await until(lambda: len(work.errors) == 1)
    assert work.errors[0][2] == 30.0
    assert queue.num_delayed == 1
    await queue.stop()


async def test_the_tick_does_not_cut_a_pause_short_but_a_change_does(work: Work) -> None:
    queue = WorkQueue(work, base_backoff_s=60.0, on_error=work.on_error)
    queue.start()
    work.failures = 1
    queue.add(A)
    await until(lambda: len(work.errors) == 1)
    queue.add_unless_backing_off(A)
    queue.add_unless_backing_off(B)
    await until(lambda: B in work.calls)
    assert work.calls == [A, B]
    queue.add(A)
    await until(lambda: work.calls == [A, B, A])
    await queue.stop()


async def test_the_earlier_of_two_delays_holds(work: Work, queue: WorkQueue) -> None:
    queue.add_after(A, 0.01)
    queue.add_after(A, 60.0)
    await until(lambda: work.calls == [A])
    assert queue.num_delayed == 0


async def test_a_pass_may_ask_to_be_due_again(work: Work, queue: WorkQueue) -> None:
    work.due_s = 0.0
    queue.add(A)
    await until(lambda: len(work.calls) >= 3)
    work.due_s = None


async def test_the_number_of_waiting_keys_is_bounded(work: Work) -> None:
    queue = WorkQueue(work, max_keys=2)
    for number in range(5):
        queue.add(NamespacedName("ns", str(number)))
    assert len(queue) == 2
    assert queue.num_dropped == 3


async def test_a_forgotten_key_leaves_no_timer_and_no_failure(work: Work) -> None:
    queue = WorkQueue(work, base_backoff_s=60.0, on_error=work.on_error)
    queue.start()
    work.failures = 1
    queue.add(A)
    await until(lambda: len(work.errors) == 1)
    queue.forget(A)
    assert queue.num_delayed == 0
    queue.add_unless_backing_off(A)
    await until(lambda: work.calls == [A, A])
    await queue.stop()


async def test_stopping_cuts_a_pass_short(work: Work) -> None:
    queue = WorkQueue(work)
    queue.start()
    work.gate.clear()
    queue.add(A)
    await until(lambda: work.running == 1)
    await queue.stop()
    assert work.running == 0


@pytest.mark.parametrize(
    ("failures", "expected"), [(1, 1.0), (2, 2.0), (5, 16.0), (9, 256.0), (10, 300.0), (5000, 300.0)]
)
def test_pauses_double_up_to_their_limit(failures: int, expected: float) -> None:
    assert compute_backoff(failures, base_s=1.0, max_s=300.0) == expected
