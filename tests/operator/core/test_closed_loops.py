"""Both decisions against small models of the world: do the loops come to rest, and where?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from kvpilot_operator.core.api_types import MemoryPolicy, MemoryTuningSpec, ScalingPolicy
from kvpilot_operator.core.memory import decide_memory
from kvpilot_operator.core.observation import EngineTuning, Unknown
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.scaling import decide_scaling
from kvpilot_operator.core.scaling_memory import ScalingMemory
from kvpilot_operator.core.tuning_memory import TuningMemory
from kvpilot_operator.testing import (
    START,
    make_engine_memory,
    make_engine_state,
    make_load,
    make_observation,
    make_replica,
    make_termination,
)

TICK_S = 5


@dataclass
class Fleet:
    """Replicas that take time to load and share a number of requests evenly; each has room for `room` at full cache."""

    scaling: ScalingPolicy
    load_time_s: int
    room: int = 20
    seconds: int = 0
    memory: ScalingMemory = field(default_factory=ScalingMemory)
    born: list[int] = field(default_factory=lambda: [-3600])
    history: list[int] = field(default_factory=lambda: [1])

    def run(self, minutes: float, requests: int) -> None:
        for _ in range(int(minutes * 60 / TICK_S)):
            self.seconds += TICK_S
            self._tick(requests)

    def _tick(self, requests: int) -> None:
        ready = [born for born in self.born if self.seconds - born >= self.load_time_s]
        share = requests / len(ready)
        load = make_load(
            kv_usage_ratio=min(1.0, share / self.room), running=int(share), waiting=max(0, int(share - self.room))
        )
        seen = [
            make_replica(f"pod-{i}", load=load)
            if born in ready
            else make_replica(f"pod-{i}", ready=False, engine=Unknown("NotScraped"))
            for i, born in enumerate(self.born)
        ]
        now = START + timedelta(seconds=self.seconds)
        decision = decide_scaling(
            self.scaling, make_observation(*seen), self.memory, now, spec_replicas=1, startup_timeout_s=1800.0
        )
        self.memory = decision.memory
        self.born = [*self.born, *[self.seconds] * (decision.desired - len(self.born))][: decision.desired]
        if decision.desired != self.history[-1]:
            self.history.append(decision.desired)


POLICY = ScalingPolicy(min_replicas=1, max_replicas=10, scale_down_stabilization_seconds=300)


@pytest.mark.parametrize("load_time_s", [0, 60, 300])
def test_a_wave_of_load_is_followed_up_and_down_once(load_time_s: int) -> None:  # D3
    fleet = Fleet(POLICY, load_time_s)
    fleet.run(30, requests=60)
    assert fleet.history[-1] == 4  # 60 requests in caches of 20 at four fifths
    assert fleet.history == sorted(fleet.history)
    fleet.run(60, requests=4)
    peak = fleet.history.index(max(fleet.history))
    assert fleet.history[peak:] == [4, 3, 2, 1]


@pytest.mark.parametrize("requests", [5, 15, 17, 30, 45, 61, 100])
def test_steady_load_comes_to_rest(requests: int) -> None:
    fleet = Fleet(POLICY, load_time_s=60)
    fleet.run(60, requests=requests)
    settled = list(fleet.history)
    fleet.run(120, requests=requests)
    assert fleet.history == settled


def test_a_short_burst_starts_nothing() -> None:
    fleet = Fleet(POLICY, load_time_s=60)
    fleet.run(TICK_S / 60, requests=100)
    fleet.run(5, requests=2)
    assert fleet.history == [1]


# --- memory: one engine on a device that fails above a hidden share


@dataclass
class Device:
    """An engine that restarts at once with the cap in force, and runs out of memory where `fails` says so."""

    fails_from: float
    needs: float = 0.3
    phase: str = "serving"
    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    memory: TuningMemory | None = None
    run: int = 0
    caps: list[float] = field(default_factory=list)
    reason: Reason = Reason.TUNED

    def step(self, hours: float = 0.1) -> None:
        cap = self.policy.utilization if self.memory is None else self.memory.utilization
        revision = 1 if self.memory is None else self.memory.revision
        self.run += 1
        now = START + timedelta(hours=hours * self.run)
        if cap < self.needs:
            code, suggested = 72, self.needs
        elif cap >= self.fails_from:
            code, suggested = (71 if self.phase == "load" else 74), None
        else:
            code, suggested = 0, None
        if code:
            end = make_termination(
                code, report={"utilization": cap, "suggested": {"utilization": suggested}}, run=self.run
            )
            end = replace(end, finished_at=now)
            pod = make_replica(ready=False, restart_count=self.run, engine=Unknown("X"), last_termination=end)
        else:
            tuning = EngineTuning(revision=revision, state="applied", utilization=cap, reason="")
            engine = make_engine_state(tuning=tuning, memory=make_engine_memory(min_utilization=self.needs))
            pod = make_replica(restart_count=self.run, started_at=now, engine=engine)
        decision = decide_memory(self.policy, make_observation(pod), self.memory, now, shape="s1")
        self.memory, self.reason = decision.memory, decision.reason
        self.caps.append(decision.utilization)


def test_an_engine_that_fails_from_a_share_on_comes_to_rest_below_it() -> None:  # D18
    device = Device(fails_from=0.86)
    for _ in range(10):
        device.step()
    assert device.caps[:4] == [0.88, 0.86, 0.84, 0.84]
    assert device.caps[-1] == 0.84
    assert device.reason is Reason.TUNED


def test_an_engine_that_always_fails_while_serving_ends_at_the_floor() -> None:  # D18
    device = Device(fails_from=0.0, policy=MemoryPolicy(tuning=MemoryTuningSpec(min=0.8, max=0.95)))
    for _ in range(20):
        device.step()
    assert device.caps[-1] == 0.8
    assert device.reason is Reason.AT_MEMORY_FLOOR


def test_an_engine_that_never_starts_is_given_up() -> None:  # D18
    device = Device(fails_from=0.0, phase="load")
    for _ in range(35):  # a restart loop of that length made a host unusable
        device.step()
    assert device.caps[-1] == device.caps[2] == 0.86
    assert device.reason is Reason.OOM_UNRESOLVED


def test_one_failure_a_day_costs_one_step_each() -> None:  # D18
    device = Device(fails_from=2.0)
    device.step()
    for day in range(3):
        device.fails_from = 0.0
        device.step(hours=24)
        device.fails_from = 2.0
        device.step(hours=24)
        assert device.caps[-1] == pytest.approx(0.88 - 0.02 * day)


def test_an_engine_that_does_not_fit_is_raised_once_to_what_it_needs() -> None:  # D18
    device = Device(fails_from=2.0, needs=0.713, policy=MemoryPolicy(utilization=0.55))
    for _ in range(4):
        device.step()
    assert device.caps == [0.72, 0.72, 0.72, 0.72]
    assert device.reason is Reason.TUNED


def test_no_share_between_too_small_and_too_large_is_said_and_not_hunted_for() -> None:  # D18
    device = Device(fails_from=0.9, needs=0.89)
    caps = []
    for _ in range(30):
        device.step()
        caps.append(device.caps[-1])
    assert len(set(caps[3:])) == 1
    assert device.reason in (Reason.MODEL_DOES_NOT_FIT, Reason.AT_MEMORY_FLOOR)
