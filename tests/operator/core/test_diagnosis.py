"""What is wrong is named, most important first, with numbers and advice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvpilot_operator.core.api_types import LLMDeploymentSpec, ModelSpec, ResourcesSpec, StartupSpec
from kvpilot_operator.core.classifier import REASON_OF_ENDING
from kvpilot_operator.core.diagnosis import Problem, find_problems, rank_problems
from kvpilot_operator.core.observation import ChildObservation, ReplicaObservation, StartFailure, Unknown
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.testing import START, make_engine_state, make_observation, make_replica, make_termination

NOW = START + timedelta(minutes=5)
SPEC = LLMDeploymentSpec(
    model=ModelSpec(source="hf://a/b"),
    resources=ResourcesSpec(limits={"memory": "256Mi"}),
    startup=StartupSpec(timeout_seconds=600),
)


def unready(**changes: Any) -> ReplicaObservation:
    return make_replica("pod-0", **{"ready": False, "engine": Unknown("NotScraped"), **changes})


def problems_of(*replicas: ReplicaObservation, **changes: Any) -> tuple[Problem, ...]:
    return find_problems(SPEC, make_observation(*replicas, **changes), NOW)


def test_nothing_is_wrong_with_ready_replicas() -> None:
    assert problems_of(make_replica("a"), make_replica("b")) == ()


@pytest.mark.parametrize(
    ("replica", "reason", "said"),
    [
        (unready(), None, ""),
        (unready(waiting_reason="ContainerCreating"), None, ""),
        (
            unready(waiting_reason="ImagePullBackOff", waiting_message="Back-off pulling image engine:2"),
            Reason.IMAGE_PULL_ERROR,
            "engine:2",
        ),
        (
            unready(waiting_reason="CreateContainerConfigError", waiting_message='secret "hf" not found'),
            Reason.CONTAINER_CONFIG_ERROR,
            'secret "hf"',
        ),
        (
            unready(scheduled=False, phase="Pending", unschedulable_message="0/3 nodes: Insufficient nvidia.com/gpu"),
            Reason.UNSCHEDULABLE,
            "Insufficient nvidia.com/gpu",
        ),
        (
            unready(scheduled=False, phase="Pending", unschedulable_message='persistentvolumeclaim "x" not found'),
            Reason.VOLUME_UNAVAILABLE,
            '"x" not found',
        ),
        (
            unready(last_termination=make_termination(137, reason="OOMKilled")),
            Reason.HOST_OOM_KILLED,
            "spec.resources.limits.memory; the device-memory cap is not the cause and stays (now 256Mi)",
        ),
        (
            unready(last_termination=make_termination(71, report={"message": "short of 1 GiB at 0.9"})),
            Reason.DEVICE_OOM_AT_LOAD,
            "short of 1 GiB at 0.9",
        ),
        (
            unready(last_termination=make_termination(72, report={"message": "needs 3 GiB of 2 GiB"})),
            Reason.MODEL_DOES_NOT_FIT,
            "needs 3 GiB of 2 GiB",
        ),
        (
            unready(
                last_termination=make_termination(66, report={"reason": "ModelAccessDenied", "message": "a/b: 401"})
            ),
            Reason.MODEL_ACCESS_DENIED,
            "accessTokenSecret",
        ),
        (
            unready(last_termination=make_termination(66, report={"reason": "ModelNotFound", "message": "no a/b"})),
            Reason.MODEL_LOAD_FAILED,
            "spec.model.source",
        ),
        (
            unready(last_termination=make_termination(64, report={"message": "--foo is not known"})),
            Reason.INVALID_SETTINGS,
            "--foo is not known",
        ),
        (unready(last_termination=make_termination(1)), Reason.CRASH_LOOP, "exit code 1"),
        (unready(last_termination=make_termination(137)), Reason.ENGINE_KILLED, "exit code 137"),
        (unready(last_termination=make_termination(0, reason="Completed")), None, ""),
        (
            unready(last_termination=make_termination(0), waiting_reason="CrashLoopBackOff"),
            Reason.CRASH_LOOP,
            "exit code 0",
        ),
        (unready(terminating=True, last_termination=make_termination(1)), None, ""),
    ],
)
def test_a_replica_says_what_keeps_it(replica: ReplicaObservation, reason: Reason | None, said: str) -> None:
    problems = problems_of(replica)
    assert [p.reason for p in problems] == ([] if reason is None else [reason])
    assert said in "".join(p.message for p in problems)


def test_an_evicted_pod_is_told_while_it_is_missed() -> None:  # C27
    evicted = unready(phase="Failed", pod_reason="Evicted", last_termination=make_termination(137))
    [problem] = problems_of(evicted, replicas_wanted=1)
    assert (problem.reason, problem.stops_ready) == (Reason.EVICTED, False)
    assert problems_of(evicted, make_replica("new"), replicas_wanted=1) == ()


def test_an_end_long_ago_does_not_explain_why_a_replica_is_not_ready_now() -> None:
    old = make_termination(137, reason="OOMKilled", finished_at=NOW - timedelta(seconds=601))
    assert problems_of(unready(last_termination=old, started_at=NOW)) == ()
    [problem] = problems_of(unready(last_termination=old, waiting_reason="CrashLoopBackOff"))
    assert problem.reason is Reason.HOST_OOM_KILLED


def test_the_scheduler_gets_a_moment() -> None:
    fresh = unready(scheduled=False, created_at=NOW - timedelta(seconds=5), unschedulable_message="0/1 nodes")
    assert problems_of(fresh) == ()


def test_a_start_that_takes_too_long_is_named_with_its_state() -> None:
    slow = unready(engine=make_engine_state(state="loading"), started_at=NOW - timedelta(seconds=600))
    [problem] = problems_of(slow)
    assert problem.reason is Reason.MODEL_LOAD_TIMEOUT
    assert "600" in problem.message
    assert "loading" in problem.message
    assert problems_of(replace(slow, started_at=NOW - timedelta(seconds=599))) == ()


def test_an_engine_that_gave_up_tells_its_last_failure() -> None:
    failure = StartFailure(
        reason="DeviceOOMAtLoad", exit_code=71, utilization=0.9, revision=1, message="short of 1 GiB"
    )
    held = unready(
        engine=make_engine_state(state="held", start_failures=(failure,) * 3), last_termination=make_termination(71)
    )
    [problem] = problems_of(held)
    assert problem.reason is Reason.OOM_UNRESOLVED
    assert "3 failed starts" in problem.message
    assert "short of 1 GiB" in problem.message


class TestReadyAgainAfterAMemoryKill:
    killed = make_termination(137, reason="OOMKilled", finished_at=NOW - timedelta(minutes=1))

    def test_once_is_told_and_leaves_it_ready(self) -> None:
        [problem] = problems_of(make_replica(last_termination=self.killed, restart_count=1))
        assert (problem.reason, problem.stops_ready) == (Reason.HOST_OOM_KILLED, False)

    def test_a_loop_is_not_ready(self) -> None:  # C22
        [problem] = problems_of(make_replica(last_termination=self.killed, restart_count=2))
        assert problem.stops_ready

    def test_long_ago_is_over(self) -> None:
        old = replace(self.killed, finished_at=NOW - timedelta(minutes=11))
        assert problems_of(make_replica(last_termination=old, restart_count=9)) == ()

    def test_other_ends_are_over_once_it_is_ready(self) -> None:
        other = replace(self.killed, reason="Error", exit_code=1)
        assert problems_of(make_replica(last_termination=other, restart_count=9)) == ()


def test_refused_pods_are_seen_on_the_deployment() -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    [problem] = problems_of(deployment_conditions=(refused,), replicas_wanted=1)
    assert (problem.reason, problem.message) == (Reason.POD_CREATION_REFUSED, "exceeded quota: gpus")


def test_a_child_of_somebody_else_is_a_conflict() -> None:
    taken = ChildObservation(kind="Service", name="llama", controlled=False, manifest={})
    [problem] = problems_of(make_replica(), children=(taken,))
    assert (problem.reason, problem.stops_ready) == (Reason.NAME_CONFLICT, True)
    assert "Service llama" in problem.message


def test_the_cause_comes_before_its_effects_and_each_reason_once() -> None:
    crashed = unready(last_termination=make_termination(1))
    denied = make_replica(
        "pod-1", ready=False, last_termination=make_termination(66, report={"reason": "ModelAccessDenied"})
    )
    reasons = [p.reason for p in problems_of(crashed, denied, replace(crashed, name="pod-2"))]
    assert reasons == [Reason.MODEL_ACCESS_DENIED, Reason.CRASH_LOOP]


def test_every_way_to_end_has_its_place_in_the_order() -> None:
    told = [Problem(reason=reason, message="m") for reason in REASON_OF_ENDING.values()]
    first = Problem(reason=Reason.INVALID_SPEC, message="m")
    unranked = Problem(reason=Reason.METRICS_MISSING, message="m")
    ranked = rank_problems([unranked, *told, first])
    assert (ranked[0], ranked[-1]) == (first, unranked)


def test_what_stops_readiness_speaks_for_its_reason() -> None:
    once = Problem(reason=Reason.HOST_OOM_KILLED, message="once", stops_ready=False)
    loop = Problem(reason=Reason.HOST_OOM_KILLED, message="loop")
    assert rank_problems([once, loop]) == (loop,)
