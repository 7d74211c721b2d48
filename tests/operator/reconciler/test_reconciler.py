"""Passes over one object against the in-memory API server: what is made, repaired, refused, and left alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.observation import EngineLoad, EngineOOM, EngineTuning, Unknown
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import (
    CHILD_RESOURCES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    LLM_DEPLOYMENTS,
    PODS,
    SERVICES,
)
from kvpilot_operator.errors import ConflictError, InvalidSpecError, RefusedError, TransientError
from kvpilot_operator.reconciler import Reconciler
from kvpilot_operator.testing import (
    FakeEngineClient,
    FakeKubeApi,
    ManualClock,
    make_engine_state,
    make_load,
    make_object,
    make_pod,
)

KEY = NamespacedName("team-a", "llama")
REVISION_TEMPLATE = "kvpilot.dev/template"


class Recorder:
    """Keeps what was recorded."""

    def __init__(self) -> None:
        self.replicas: dict[NamespacedName, Mapping[str, int]] = {}
        self.ooms: list[str] = []

    def set_object(self, key: NamespacedName, *, replicas: Mapping[str, int], utilization: float | None) -> None:
        self.replicas[key] = replicas

    def count_oom(self, key: NamespacedName, kind: str) -> None:
        self.ooms.append(kind)

    def forget_object(self, key: NamespacedName) -> None:
        self.replicas.pop(key, None)


class World:
    """An API server, engines and a clock, and an operator that can be started anew."""

    def __init__(self) -> None:
        self.api = FakeKubeApi()
        self.engines = FakeEngineClient()
        self.clock = ManualClock()
        self.recorder = Recorder()
        self.restart()

    def restart(self) -> None:
        """A new process: nothing but the API server remembers."""
        self.reconciler = Reconciler(
            self.api, self.engines, self.clock, default_engine_image="engine:default", recorder=self.recorder
        )
        self.api.watcher = lambda owner: self.reconciler.note_child_change(owner)

    async def run(self, passes: int = 3) -> None:
        for _ in range(passes):
            await self.reconciler.reconcile(KEY)
            self.clock.advance(5)

    def add_object(self, **spec: Any) -> None:
        self.api.put(make_object(**spec))

    def change_spec(self, **spec: Any) -> None:
        manifest = self.object
        manifest["spec"].update(spec)
        self.api.put(manifest)

    def add_pods(self, count: int, **state: Any) -> None:
        """Ready pods of the present template, each with an engine that answers."""
        labels = {REVISION_TEMPLATE: self.status["template"]}
        for number in range(count):
            pod = self.api.put(make_pod(f"llama-{number}", labels=labels))
            self.engines.states[pod["metadata"]["uid"]] = make_engine_state(**state)

    @property
    def object(self) -> Manifest:
        manifest = self.api.peek(LLM_DEPLOYMENTS, *KEY)
        assert manifest is not None
        return manifest

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.object.get("status", {})
        return status

    @property
    def deployment(self) -> Manifest:
        manifest = self.api.peek(DEPLOYMENTS, *KEY)
        assert manifest is not None
        return manifest

    @property
    def tuning_file(self) -> dict[str, Any]:
        config_map = self.api.peek(CONFIG_MAPS, "team-a", "llama-tuning")
        assert config_map is not None
        content: dict[str, Any] = json.loads(config_map["data"]["tuning.json"])
        return content

    def condition(self, type_: str) -> dict[str, Any]:
        found: dict[str, Any] = next(c for c in self.status["conditions"] if c["type"] == type_)
        return found


@pytest.fixture
def world() -> World:
    return World()


async def test_an_object_gets_all_its_children_owned_and_labelled(world: World) -> None:
    world.add_object(replicas=2)
    await world.run(1)
    uid = world.object["metadata"]["uid"]
    for resource in CHILD_RESOURCES:
        (child,) = world.api.all_of(resource)
        assert child["metadata"]["ownerReferences"][0]["uid"] == uid
        assert child["metadata"]["labels"]["kvpilot.dev/deployment"] == "llama"
        assert "finalizers" not in child["metadata"]
    assert world.deployment["spec"]["replicas"] == 2
    assert world.tuning_file == {"revision": 1, "memory_utilization": {"default": 0.9}}


async def test_nothing_is_written_when_nothing_changed(world: World) -> None:
    world.add_object()
    await world.run(2)
    world.add_pods(1)
    await world.run(3)
    before = len(world.api.writes)
    await world.run(5)
    assert world.api.writes[before:] == []


async def test_the_applied_template_never_names_replicas(world: World) -> None:  # C20
    world.add_object(replicas=3)
    await world.run()
    assert ("patch", "deployments/scale", "llama") in world.api.writes
    assert world.deployment["spec"]["replicas"] == 3
    world.change_spec(rollout={"maxSurge": 1, "maxUnavailable": 0})
    await world.run()
    assert world.deployment["spec"]["replicas"] == 3
    assert world.deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1


@pytest.mark.parametrize("resource", CHILD_RESOURCES, ids=lambda resource: str(resource.kind))
async def test_a_deleted_child_is_made_again(world: World, resource: Any) -> None:  # C5
    world.add_object()
    await world.run()
    (child,) = world.api.all_of(resource)
    world.api.remove(resource, "team-a", child["metadata"]["name"])
    await world.run()
    (again,) = world.api.all_of(resource)
    assert again["metadata"]["name"] == child["metadata"]["name"]


async def test_an_edit_of_a_managed_field_is_reverted_and_others_are_kept(world: World) -> None:  # C5
    world.add_object()
    await world.run()
    service = world.api.peek(SERVICES, *KEY)
    assert service is not None
    service["spec"]["selector"] = {"app": "other"}
    service["metadata"]["annotations"]["team"] = "blue"
    world.api.put(service)
    await world.run()
    service = world.api.peek(SERVICES, *KEY)
    assert service is not None
    assert service["spec"]["selector"]["kvpilot.dev/deployment"] == "llama"
    assert service["metadata"]["annotations"]["team"] == "blue"


async def test_replicas_set_by_hand_on_the_deployment_are_set_back(world: World) -> None:  # C20
    world.add_object(replicas=2)
    await world.run()
    world.api.scale_as("kubectl", "team-a", "llama", 4)
    await world.run()
    assert world.deployment["spec"]["replicas"] == 2


async def test_a_foreign_autoscaler_is_told_of_and_left_alone(world: World) -> None:  # C20
    world.add_object(replicas=2)
    await world.run()
    world.api.scale_as("kube-controller-manager", "team-a", "llama", 4)
    await world.run()
    assert world.deployment["spec"]["replicas"] == 4
    assert world.condition("ScalingActive")["reason"] == "ExternalScaler"
    world.api.scale_as("kubectl", "team-a", "llama", 3)  # the HPA was removed, and this hands the replicas back
    await world.run()
    assert world.deployment["spec"]["replicas"] == 4
    assert world.condition("ScalingActive")["reason"] != "ExternalScaler"


async def test_entering_external_mode_keeps_what_runs(world: World) -> None:  # C20
    world.add_object(replicas=1, scaling={"minReplicas": 3})
    await world.run()
    assert world.deployment["spec"]["replicas"] == 3
    world.change_spec(scaling={"mode": "External"})
    await world.run()
    assert world.object["spec"]["replicas"] == 3
    assert world.deployment["spec"]["replicas"] == 3
    world.change_spec(replicas=2)
    await world.run()
    assert world.deployment["spec"]["replicas"] == 2


async def test_an_object_in_the_place_of_a_child_is_never_touched(world: World) -> None:
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "team-a", "name": "llama"}, "spec": {}}
    world.api.put(foreign)
    before = world.api.peek(SERVICES, *KEY)
    world.add_object()
    await world.run()
    assert world.api.peek(SERVICES, *KEY) == before
    assert world.condition("Degraded")["reason"] == "NameConflict"
    assert world.condition("Ready")["status"] == "False"
    world.api.remove(SERVICES, *KEY)
    await world.run()
    assert world.condition("Degraded")["status"] == "False"


async def test_children_orphaned_by_an_earlier_object_are_taken_back(world: World) -> None:  # C5
    world.add_object()
    await world.run()
    for resource in CHILD_RESOURCES:
        for child in world.api.all_of(resource):
            del child["metadata"]["ownerReferences"]
            world.api.put(child)
    world.api.remove(LLM_DEPLOYMENTS, *KEY)
    world.restart()
    world.add_object()
    await world.run()
    uid = world.object["metadata"]["uid"]
    for resource in CHILD_RESOURCES:
        for child in world.api.all_of(resource):
            assert [reference["uid"] for reference in child["metadata"]["ownerReferences"]] == [uid]


async def test_children_of_an_object_that_is_being_collected_are_a_conflict_until_they_are_gone(world: World) -> None:
    world.add_object()
    await world.run()
    world.api.remove(LLM_DEPLOYMENTS, *KEY)
    world.add_object()
    await world.run()
    assert world.condition("Degraded")["reason"] == "NameConflict"
    for resource in CHILD_RESOURCES:  # the garbage collector
        for child in world.api.all_of(resource):
            world.api.remove(resource, "team-a", child["metadata"]["name"])
    await world.run()
    assert world.condition("Degraded")["status"] == "False"
    assert len(world.api.all_of(DEPLOYMENTS)) == 1


async def test_a_gone_object_is_forgotten_and_nothing_is_written(world: World) -> None:
    world.add_object()
    await world.run()
    assert KEY in world.recorder.replicas
    world.api.remove(LLM_DEPLOYMENTS, *KEY)
    before = len(world.api.writes)
    await world.run()
    assert KEY not in world.recorder.replicas
    assert world.api.writes[before:] == []


async def test_an_object_that_is_being_deleted_is_left_alone(world: World) -> None:
    world.add_object()
    manifest = world.object
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.api.put(manifest)
    await world.run()
    assert world.api.writes == []


async def test_an_invalid_spec_is_a_condition_and_mended_by_the_next_edit(world: World) -> None:  # C10
    world.add_object(scaling={"minReplicas": 5, "maxReplicas": 2})
    await world.run()
    assert world.condition("Ready")["reason"] == "InvalidSpec"
    assert "minReplicas" in world.condition("Ready")["message"]
    assert world.api.all_of(DEPLOYMENTS) == []
    world.change_spec(scaling={"minReplicas": 1, "maxReplicas": 2})
    await world.run()
    assert world.condition("Degraded")["status"] == "False"
    assert len(world.api.all_of(DEPLOYMENTS)) == 1


async def test_an_image_that_nobody_names_is_an_invalid_spec(world: World) -> None:
    world.reconciler = Reconciler(
        world.api, world.engines, world.clock, default_engine_image="", recorder=world.recorder
    )
    world.add_object(engine={"device": "cpu"})
    await world.run()
    assert world.condition("Ready")["reason"] == "InvalidSpec"
    assert "spec.engine.image" in world.condition("Ready")["message"]


async def test_the_image_of_the_first_sight_stays_when_the_default_moves_on(world: World) -> None:  # C17
    world.add_object(engine={"device": "cpu"})
    await world.run()
    assert world.status["image"] == "engine:default"
    world.reconciler = Reconciler(
        world.api, world.engines, world.clock, default_engine_image="engine:newer", recorder=world.recorder
    )
    before = world.deployment
    await world.run()
    assert world.deployment == before
    update = world.condition("UpdateAvailable")
    assert update["status"] == "True"
    offered = update["message"].split('"')[1]
    manifest = world.object
    manifest["metadata"]["annotations"] = {"kvpilot.dev/accept-update": offered}
    world.api.put(manifest)
    await world.run()
    assert world.deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:newer"
    assert world.status["image"] == "engine:newer"
    assert world.condition("UpdateAvailable")["status"] == "False"


async def test_a_template_that_the_server_refuses_is_said_and_not_sent_at_every_tick(world: World) -> None:  # C10
    world.add_object()
    world.api.errors["patch", "deployments"] = InvalidSpecError("failed to create typed patch object: .spec.foo")
    await world.run(3)
    assert world.condition("Ready")["reason"] == "InvalidSpec"
    assert "typed patch object" in world.condition("Ready")["message"]
    del world.api.errors["patch", "deployments"]
    await world.run(3)
    assert world.api.all_of(DEPLOYMENTS) == []  # remembered: nothing that was refused has changed
    world.change_spec(startup={"timeoutSeconds": 60})
    await world.run()
    assert len(world.api.all_of(DEPLOYMENTS)) == 1


async def test_what_was_refused_is_tried_again_after_a_while(world: World) -> None:  # C10
    world.add_object()
    world.api.errors["patch", "deployments"] = InvalidSpecError("a class that does not exist yet")
    await world.run()
    del world.api.errors["patch", "deployments"]
    world.clock.advance(400)
    await world.run()
    assert len(world.api.all_of(DEPLOYMENTS)) == 1
    assert world.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("error", [TransientError("HTTP 500"), ConflictError("HTTP 409")])
async def test_a_server_error_ends_the_pass_and_the_next_one_completes_it(  # C10
    world: World, error: Exception
) -> None:
    world.add_object(replicas=2)
    world.api.errors["patch", "services"] = error
    with pytest.raises(type(error)):
        await world.run(1)
    world.api.errors.clear()
    await world.run()
    assert world.deployment["spec"]["replicas"] == 2


async def test_a_refusal_is_shown_in_status_and_retried_by_the_queue(world: World) -> None:  # C10
    world.add_object()
    world.api.errors["patch", "poddisruptionbudgets"] = RefusedError("exceeded quota: objects")
    with pytest.raises(RefusedError):
        await world.run(1)
    assert world.condition("Degraded")["reason"] == "WriteRefused"
    assert "exceeded quota" in world.condition("Degraded")["message"]


async def test_a_paused_object_is_observed_and_not_changed(world: World) -> None:
    world.add_object(replicas=2)
    await world.run()
    manifest = world.object
    manifest["metadata"]["annotations"] = {"kvpilot.dev/paused": "true"}
    world.api.put(manifest)
    world.change_spec(service={"port": 9000})
    before = len(world.api.writes)
    world.add_pods(2, load=make_load(kv_usage_ratio=0.99, waiting=50))
    await world.run(20)
    assert {resource for _, resource, _ in world.api.writes[before:]} <= {"llmdeployments/status", "events"}
    assert world.deployment["spec"]["replicas"] == 2
    assert world.status["phase"] == "Paused"
    world.api.put({**world.object, "metadata": {**world.object["metadata"], "annotations": {}}})
    await world.run(4)
    service = world.api.peek(SERVICES, *KEY)
    assert service is not None
    assert service["spec"]["ports"][0]["port"] == 9000
    assert world.deployment["spec"]["replicas"] > 2


async def test_load_adds_replicas_and_says_why(world: World) -> None:
    world.add_object()
    await world.run()
    world.add_pods(1, load=make_load(kv_usage_ratio=0.98, waiting=9))
    await world.run(5)
    assert world.deployment["spec"]["replicas"] == 2
    (decision,) = [d for d in world.status["decisions"] if (d["from"], d["to"]) == (1, 2)]
    assert decision["inputs"]["ready"] == 1
    assert [event["reason"] for event in world.api.all_of(EVENTS)].count(decision["reason"]) == 1


async def test_ready_is_never_lost_while_load_adds_a_replica(world: World) -> None:  # C22
    world.add_object()
    await world.run()
    world.add_pods(1, load=make_load(kv_usage_ratio=0.98, waiting=9))
    seen: list[tuple[str, str]] = []

    async def look(passes: int) -> None:
        for _ in range(passes):
            await world.run(1)
            seen.append((world.condition("Ready")["status"], world.condition("Progressing")["status"]))

    await look(2)
    # Either write fails once, what scaling remembers and the replicas: what was not asked for is not missing.
    for verb, resource in (("patch", "llmdeployments/status"), ("patch", "deployments/scale")):
        world.api.next_errors[verb, resource] = TransientError("away")
        with pytest.raises(TransientError):
            await look(1)
        assert world.condition("Ready")["status"] == "True"
    await look(1)
    assert world.deployment["spec"]["replicas"] == 2
    labels = {REVISION_TEMPLATE: world.status["template"]}
    world.api.put(make_pod("llama-1", labels=labels, ready=False))
    await look(3)
    assert world.status["scaling"]["growingFrom"] == 1
    assert {ready for ready, _ in seen} == {"True"}
    assert seen[-1] == ("True", "True")
    world.api.put(make_pod("llama-1", labels=labels))
    for uid in ("pod-llama-0", "pod-llama-1"):
        world.engines.states[uid] = make_engine_state(load=make_load(kv_usage_ratio=0.6))
    await look(1)
    assert seen[-1] == ("True", "False")
    assert "growingFrom" not in world.status["scaling"]
    assert world.condition("Ready")["reason"] == "AllReplicasReady"


async def test_load_that_lasts_adds_a_replica_though_its_beginning_was_not_written(world: World) -> None:
    world.add_object()
    await world.run()
    world.add_pods(1, load=make_load(kv_usage_ratio=0.7))
    await world.run(10)

    async def look(kv_usage_ratio: float, passes: int) -> None:
        world.engines.states["pod-llama-0"] = make_engine_state(load=make_load(kv_usage_ratio=kv_usage_ratio))
        await world.run(passes)

    before = len(world.api.writes)
    for _ in range(3):  # bursts
        await look(0.98, 2)
        await look(0.7, 1)
    assert world.api.writes[before:] == []
    await look(0.98, 2)
    world.reconciler.let_go()  # another operator may have seen a calm meanwhile
    await look(0.98, 1)
    assert world.deployment["spec"]["replicas"] == 1
    world.clock.advance(600)  # a slow tick
    await look(0.98, 1)
    assert world.deployment["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("replicas", "loads"),
    [
        (1, [make_load(kv_usage_ratio=0.83), make_load(kv_usage_ratio=0.77)]),
        (1, [make_load(waiting=5), make_load(waiting=3)]),
        (2, [make_load(kv_usage_ratio=0.30), make_load(kv_usage_ratio=0.42)]),
        (4, [make_load(kv_usage_ratio=0.90), make_load(kv_usage_ratio=0.60)]),
        (4, [make_load(kv_usage_ratio=0.90), make_load(kv_usage_ratio=0.60), make_load(kv_usage_ratio=0.10)]),
        (2, [make_load(kv_usage_ratio=0.5, preemptions_total=n // 4) for n in range(240)]),
    ],
    ids=["kv at target", "queue at target", "one less at target", "at the maximum", "all over the place", "preempting"],
)
async def test_load_that_hovers_is_not_written_with_every_look(
    world: World, replicas: int, loads: list[EngineLoad]
) -> None:
    world.add_object(replicas=replicas)
    await world.run()
    world.add_pods(replicas, load=loads[-1])
    await world.run(1)
    before = len(world.api.writes)
    for step in range(240):  # twenty minutes
        for number in range(replicas):
            world.engines.states[f"pod-llama-{number}"] = make_engine_state(load=loads[step % len(loads)])
        await world.run(1)
    writes = [resource for _, resource, _ in world.api.writes[before:]]
    assert world.deployment["spec"]["replicas"] == replicas
    assert set(writes) <= {"llmdeployments/status"}
    assert len(writes) <= 14
    assert len(world.status["decisions"]) < 20


async def test_an_unknown_replica_never_lowers_the_count(world: World) -> None:  # D1
    world.add_object(replicas=3, scaling={"scaleDownStabilizationSeconds": 0})
    await world.run()
    world.add_pods(3)
    world.engines.states["pod-llama-2"] = Unknown("Timeout")
    await world.run(10)
    assert world.deployment["spec"]["replicas"] == 3
    assert world.recorder.replicas[KEY]["unknown"] == 1
    world.engines.states["pod-llama-2"] = make_engine_state()
    await world.run(1)
    assert world.deployment["spec"]["replicas"] == 2


async def test_the_emptiest_pod_is_marked_before_replicas_are_lowered(world: World) -> None:
    world.add_object(replicas=2, scaling={"scaleDownStabilizationSeconds": 0})
    await world.run()
    world.add_pods(2)
    world.engines.states["pod-llama-0"] = make_engine_state(load=make_load(running=5))
    before = len(world.api.writes)
    await world.run(1)
    assert world.deployment["spec"]["replicas"] == 1
    writes = [resource for _, resource, _ in world.api.writes[before:]]
    assert writes.index("pods") < writes.index("deployments/scale")
    costs = [pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"]
             for pod in world.api.all_of(PODS)]  # fmt: skip
    assert costs == ["5", "0"]


def own_oom(seq: int = 1, utilization: float = 0.9) -> EngineOOM:
    return EngineOOM(seq=seq, phase="decode", cause="own", utilization=utilization, survived=True, message="short")


async def test_an_own_oom_lowers_the_cap_once_and_the_pod_is_touched_until_it_knows(world: World) -> None:
    world.add_object()
    await world.run()
    world.add_pods(1, oom_events=(own_oom(),), oom_seq=1)
    await world.run(5)
    assert world.tuning_file == {"revision": 2, "memory_utilization": {"default": 0.88}}
    assert world.recorder.ooms == ["DeviceOOMServing"]
    assert world.engines.targets[-1].since == 1
    pod = world.api.peek(PODS, "team-a", "llama-0")
    assert pod is not None
    first = pod["metadata"]["annotations"]["kvpilot.dev/tuning-touch"]
    assert first.startswith("2.")
    await world.run(5)
    pod = world.api.peek(PODS, "team-a", "llama-0")
    assert pod is not None
    assert pod["metadata"]["annotations"]["kvpilot.dev/tuning-touch"] != first
    known = EngineTuning(revision=2, state="applied", utilization=0.88, reason="")
    world.engines.states["pod-llama-0"] = make_engine_state(tuning=known, oom_events=(own_oom(),), oom_seq=1)
    await world.run()
    before = len(world.api.writes)
    await world.run(5)
    assert [write for write in world.api.writes[before:] if write[1] == "pods"] == []
    assert world.status["memory"]["appliedReplicas"] == 1


async def test_a_lost_tuning_config_map_comes_back_with_what_was_learned(world: World) -> None:  # C5
    world.add_object()
    await world.run()
    world.add_pods(1, oom_events=(own_oom(),), oom_seq=1)
    await world.run()
    world.api.remove(CONFIG_MAPS, "team-a", "llama-tuning")
    world.restart()
    await world.run()
    assert world.tuning_file == {"revision": 2, "memory_utilization": {"default": 0.88}}


async def test_a_pod_in_back_off_is_replaced_once_its_cap_has_changed(world: World) -> None:
    world.add_object()
    await world.run()
    words = {"reason": "DeviceOOMAtLoad", "phase": "load", "cause": "own", "message": "short", "utilization": 0.9,
             "requested_bytes": 10, "limit_bytes": 100, "free_bytes": 0, "suggested": {}, "oom_seq": 1}  # fmt: skip
    ended = {"exitCode": 71, "reason": "Error", "message": json.dumps(words), "finishedAt": "2026-01-01T00:00:10Z"}
    container = {
        "name": "engine", "restartCount": 1, "ready": False, "lastState": {"terminated": ended},
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    }  # fmt: skip
    world.api.put(make_pod("llama-0", ready=False, status={"containerStatuses": [container]}))
    await world.run(2)
    assert world.tuning_file["memory_utilization"]["default"] < 0.9
    assert world.api.all_of(PODS) == []


async def test_events_come_with_changes_only(world: World) -> None:  # C13
    world.add_object()
    await world.run()
    world.add_pods(1)
    await world.run(100)
    assert [event["reason"] for event in world.api.all_of(EVENTS)] == ["AllReplicasReady"]


def count_lists(world: World) -> list[str]:
    return [resource for verb, resource in world.api.reads if verb == "list"]


async def test_a_tick_without_changes_lists_pods_only_and_everything_after_a_minute(world: World) -> None:
    world.add_object()
    await world.run(3)
    world.api.reads.clear()
    await world.run(5)
    assert count_lists(world) == ["pods"] * 5
    world.clock.advance(60)
    await world.run(1)
    assert "configmaps" in count_lists(world)


async def test_a_change_that_no_watch_told_is_repaired_after_a_minute(world: World) -> None:  # C9
    world.add_object()
    await world.run(3)
    world.api.watcher = lambda _owner: None
    world.api.remove(SERVICES, *KEY)
    await world.run(3)
    assert world.api.all_of(SERVICES) == []
    world.clock.advance(60)
    await world.run(1)
    assert len(world.api.all_of(SERVICES)) == 1
