"""C6: the process may die before any write. A new one ends in the same state, and lowers nothing twice on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.observation import EngineOOM, EngineTuning
from kvpilot_operator.core.resources import CHILD_RESOURCES, CONFIG_MAPS, DEPLOYMENTS, LLM_DEPLOYMENTS, PODS
from kvpilot_operator.reconciler import Reconciler
from kvpilot_operator.testing import (
    Crash,
    FakeEngineClient,
    FakeKubeApi,
    ManualClock,
    make_engine_state,
    make_load,
    make_object,
    make_pod,
)

KEY = NamespacedName("team-a", "llama")
MAX_WRITES = 40


class _NoRecorder:
    def set_object(self, key: NamespacedName, **_: Any) -> None: ...

    def count_oom(self, key: NamespacedName, kind: str) -> None: ...

    def forget_object(self, key: NamespacedName) -> None: ...


class Run:
    """One history: an API server whose operator dies before its n-th write, and is started again."""

    def __init__(self, crash_before: int | None) -> None:
        self.api = FakeKubeApi()
        self.engines = FakeEngineClient()
        self.clock = ManualClock()
        self.has_crashed = False
        self.caps: list[float] = []
        self.replicas: list[int] = []
        self.on_crash: Callable[[Run], None] = lambda _run: None
        """What goes on in the cluster while the operator is away."""
        self._crash_before = crash_before
        self._reconciler = self._start()

    def _start(self) -> Reconciler:
        reconciler = Reconciler(
            self.api, self.engines, self.clock, default_engine_image="engine:1", recorder=_NoRecorder()
        )
        self.api.watcher = reconciler.note_child_change
        return reconciler

    def restart(self) -> None:
        """A new process: nothing but the API server remembers."""
        self._reconciler = self._start()

    def arm(self) -> None:
        if self._crash_before is not None:
            self.api.crash_before_write = len(self.api.writes) + self._crash_before

    async def run(self, passes: int) -> None:
        for _ in range(passes):
            try:
                await self._reconciler.reconcile(KEY)
            except Crash:
                self.has_crashed = True
                self.api.crash_before_write = None
                self.on_crash(self)
                self.restart()
            self._note()
            self.clock.advance(5)

    def _note(self) -> None:
        config_map = self.api.peek(CONFIG_MAPS, "team-a", "llama-tuning")
        if config_map is not None:
            self.caps.append(json.loads(config_map["data"]["tuning.json"])["memory_utilization"]["default"])
        deployment = self.api.peek(DEPLOYMENTS, *KEY)
        if deployment is not None:
            self.replicas.append(deployment["spec"]["replicas"])

    @property
    def marks(self) -> dict[str, Any]:
        """How far the events of each pod are handled, as both copies have it."""
        config_map = self.api.peek(CONFIG_MAPS, "team-a", "llama-tuning")
        manifest = self.api.peek(LLM_DEPLOYMENTS, *KEY)
        assert config_map is not None
        assert manifest is not None
        kept = json.loads(config_map["data"]["memory.json"])
        return {"config map": kept.get("handled"), "status": manifest["status"]["memory"].get("handled")}

    def end_state(self) -> dict[str, Any]:
        """What must not depend on where it was cut: everything but times, versions and who wrote last."""
        state: dict[str, Any] = {}
        for resource in CHILD_RESOURCES:
            for child in self.api.all_of(resource):
                value = {key: child.get(key) for key in ("spec", "data", "revision")}
                if resource is CONFIG_MAPS:
                    value = {"data": json.loads(child["data"]["tuning.json"])}
                state[f"{resource.kind}/{child['metadata']['name']}"] = value
        manifest = self.api.peek(LLM_DEPLOYMENTS, *KEY)
        assert manifest is not None
        status = manifest["status"]
        state["spec"] = manifest["spec"]
        state["status"] = {key: status[key] for key in ("phase", "desiredReplicas", "image", "template", "replicas")}
        state["conditions"] = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
        return state

    def add_pods(self, count: int, **state: Any) -> None:
        manifest = self.api.peek(LLM_DEPLOYMENTS, *KEY)
        assert manifest is not None
        labels = {"kvpilot.dev/template": manifest["status"]["template"]}
        for number in range(count):
            pod = self.api.put(make_pod(f"llama-{number}", labels=labels))
            self.engines.states[pod["metadata"]["uid"]] = make_engine_state(**state)


async def create(run: Run) -> None:
    run.arm()
    run.api.put(make_object(replicas=3))
    await run.run(6)


async def change_the_spec(run: Run) -> None:
    run.api.put(make_object(replicas=2))
    await run.run(3)
    run.arm()
    manifest = run.api.peek(LLM_DEPLOYMENTS, *KEY)
    assert manifest is not None
    manifest["spec"]["service"] = {"port": 9000}
    manifest["spec"]["engine"] = {"image": "engine:2", "device": "cpu"}
    run.api.put(manifest)
    await run.run(6)


async def lose_a_child(run: Run) -> None:
    run.api.put(make_object(replicas=2))
    await run.run(3)
    run.arm()
    for resource in CHILD_RESOURCES:
        for child in run.api.all_of(resource):
            run.api.remove(resource, "team-a", child["metadata"]["name"])
    await run.run(6)


async def run_out_of_memory(run: Run) -> None:
    run.api.put(make_object())
    await run.run(3)
    oom = EngineOOM(seq=1, phase="decode", cause="own", utilization=0.9, survived=True, message="short")
    run.arm()
    run.add_pods(1, oom_events=(oom,), oom_seq=1)
    await run.run(6)
    known = EngineTuning(revision=2, state="applied", utilization=0.88, reason="")
    run.engines.states["pod-llama-0"] = make_engine_state(tuning=known, oom_events=(oom,), oom_seq=1)
    await run.run(4)


async def scale_down(run: Run) -> None:
    run.api.put(make_object(replicas=3, scaling={"scaleDownStabilizationSeconds": 60}))
    await run.run(3)
    run.arm()
    run.add_pods(3, load=make_load(kv_usage_ratio=0.2))
    await run.run(28)


async def enter_external_mode(run: Run) -> None:
    run.api.put(make_object(scaling={"minReplicas": 3}))
    await run.run(3)
    run.arm()
    manifest = run.api.peek(LLM_DEPLOYMENTS, *KEY)
    assert manifest is not None
    manifest["spec"]["scaling"] = {"mode": "External"}
    run.api.put(manifest)
    await run.run(6)


Story = Callable[[Run], Any]
STORIES: list[Story] = [create, change_the_spec, lose_a_child, run_out_of_memory, scale_down, enter_external_mode]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: str(story.__name__))
async def test_dying_before_any_write_ends_in_the_same_state(story: Story) -> None:  # C6
    whole = Run(None)
    await story(whole)
    expected = whole.end_state()
    crashes = 0
    for crash_before in range(MAX_WRITES):
        run = Run(crash_before)
        await story(run)
        if not run.has_crashed:
            break
        crashes += 1
        assert run.end_state() == expected, f"died before write {crash_before}"
        assert len(run.api.all_of(DEPLOYMENTS)) == 1
    assert crashes >= 2
    assert crashes < MAX_WRITES, "the story writes without end"


async def test_dying_between_the_cap_and_the_status_lowers_the_cap_once() -> None:  # C6
    for crash_before in range(MAX_WRITES):
        run = Run(crash_before)
        await run_out_of_memory(run)
        assert sorted(set(run.caps), reverse=True) == [0.9, 0.88], f"died before write {crash_before}"
        if not run.has_crashed:
            return
    pytest.fail("the story writes without end")


def end_run_of_pod(run: Run) -> None:
    """The run whose engine told of an OOM ends: its last words tell it again, without its share and as a larger one."""
    words = {"reason": "DeviceOOMWhileServing", "requested_bytes": 5 * 2**27, "free_bytes": 0, "oom_seq": 1}
    ended = {"exitCode": 74, "reason": "Error", "message": json.dumps(words), "finishedAt": "2026-01-01T00:00:20Z"}
    pod = run.api.peek(PODS, "team-a", "llama-0")
    assert pod is not None
    (container,) = pod["status"]["containerStatuses"]
    container |= {"restartCount": 1, "lastState": {"terminated": ended}}
    run.api.put(pod)
    run.engines.states["pod-llama-0"] = make_engine_state()


async def test_an_event_that_reads_differently_after_a_crash_lowers_the_cap_once() -> None:  # C6
    lowered_before_the_crash = 0
    for crash_before in range(MAX_WRITES):
        run = Run(crash_before)
        run.on_crash = end_run_of_pod
        run.api.put(make_object())
        await run.run(3)
        oom = EngineOOM(seq=1, phase="decode", cause="own", utilization=0.9, survived=False, message="short")
        run.add_pods(1, oom_events=(oom,), oom_seq=1)
        run.arm()
        await run.run(6)
        if not run.has_crashed:
            assert lowered_before_the_crash >= 1
            return
        caps = list(dict.fromkeys(run.caps))
        assert len(caps) == 2, f"died before write {crash_before}: {caps}"
        lowered_before_the_crash += caps == [0.9, 0.88]
    pytest.fail("the story writes without end")


async def test_a_restart_loses_no_handled_mark() -> None:  # C6
    run = Run(None)
    run.api.put(make_object())
    await run.run(3)
    oom = EngineOOM(seq=3, phase="decode", cause="own", utilization=0.9, survived=True, message="short")
    run.add_pods(2, oom_events=(oom,), oom_seq=3)
    await run.run(3)
    expected = [{"pod": f"pod-llama-{n}", "run": 0, "seq": 3, "endedRun": -1} for n in range(2)]
    assert run.marks == {"config map": expected, "status": expected}
    run.engines.targets.clear()
    run.restart()
    await run.run(3)
    assert {(target.uid, target.since) for target in run.engines.targets} == {("pod-llama-0", 3), ("pod-llama-1", 3)}
    run.api.remove(CONFIG_MAPS, "team-a", "llama-tuning")  # its other copy serves
    run.restart()
    await run.run(3)
    assert run.marks == {"config map": expected, "status": expected}
    assert list(dict.fromkeys(run.caps)) == [0.9, 0.88]


async def test_dying_around_a_scale_down_never_lowers_twice_within_the_window() -> None:  # C6
    for crash_before in range(MAX_WRITES):
        run = Run(crash_before)
        await scale_down(run)
        steps = [new - old for old, new in pairwise(run.replicas) if new != old]
        lowered = [index for index, (old, new) in enumerate(pairwise(run.replicas)) if new < old]
        assert all(step == -1 for step in steps if step < 0), f"died before write {crash_before}"
        assert all(later - earlier >= 12 for earlier, later in pairwise(lowered))
        if not run.has_crashed:
            return
    pytest.fail("the story writes without end")


async def test_two_passes_at_once_double_nothing() -> None:  # C6
    run = Run(None)
    run.api.put(make_object(replicas=2))
    other = run._start()
    await run.run(1)
    await other.reconcile(KEY)
    assert [len(run.api.all_of(resource)) for resource in CHILD_RESOURCES] == [1] * len(CHILD_RESOURCES)
    assert run.api.all_of(PODS) == []
