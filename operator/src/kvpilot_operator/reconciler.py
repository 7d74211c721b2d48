"""One pass over one object: observe → decide → plan → apply → status. Level-triggered, and safe to cut short anywhere.

Knows no client and no framework: it is given ports. Nothing that matters is remembered here; what the loops must know
of the past is read from the tuning ConfigMap and the object's status. Order of writes: the cap with its handled events
(one ConfigMap write), the other children, what scaling remembers, the replicas, the status.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import Any

from kvpilot_operator.child_cache import ChildCache
from kvpilot_operator.core import naming
from kvpilot_operator.core.api_status import LLMDeploymentStatus, parse_status
from kvpilot_operator.core.api_types import LLMDeploymentSpec, ScalingMode, parse_spec
from kvpilot_operator.core.diagnosis import Problem, find_problems, rank_problems
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.memory import MemoryDecision, decide_memory, engine_shape
from kvpilot_operator.core.memory_events import collect_events
from kvpilot_operator.core.merge_patch import build_merge_patch
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.observation import ChildObservation, DeploymentObservation
from kvpilot_operator.core.plan import (
    Action,
    Apply,
    ReconcilePlan,
    ScaleDeployment,
    Wanted,
    WriteSpecReplicas,
    claim_replicas,
    plan,
)
from kvpilot_operator.core.pod_care import plan_pod_annotations, plan_pod_deletions
from kvpilot_operator.core.ports import Clock, EngineClient, KubeApi, Manifest, Recorder
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.rendering import read_tuning_memory, render_children
from kvpilot_operator.core.resources import CONFIG_MAPS, LLM_DEPLOYMENTS
from kvpilot_operator.core.scaling import ScalingDecision, decide_scaling
from kvpilot_operator.core.scaling_memory import parse_scaling_memory
from kvpilot_operator.core.status import Rendering, compute_status
from kvpilot_operator.core.template_pinning import TemplateChoice, choose_template
from kvpilot_operator.core.tuning_memory import TuningMemory
from kvpilot_operator.errors import InvalidSpecError, NamespaceGoingError, OperatorError, RefusedError
from kvpilot_operator.executor import Executor
from kvpilot_operator.observer import Observer
from kvpilot_operator.scaling_recall import ScalingRecall
from kvpilot_operator.status_writer import StatusWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What was seen of one object."""

    manifest: Manifest
    owner: Owner
    spec: LLMDeploymentSpec
    children: tuple[ChildObservation, ...]
    tuning: TuningMemory | None
    observation: DeploymentObservation
    now: datetime

    @property
    def status(self) -> Mapping[str, Any]:
        return self.manifest.get("status") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.manifest["metadata"].get("annotations") or {}

    @property
    def is_paused(self) -> bool:
        return self.annotations.get(naming.ANNOTATION_PAUSED) == "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decisions:
    scaling: ScalingDecision
    memory: MemoryDecision
    choice: TemplateChoice


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How far the plan was carried out."""

    error: OperatorError | None
    _: KW_ONLY
    is_scaling_kept: bool
    """What scaling remembers holds, and is to be written."""
    is_memory_kept: bool


class Reconciler:
    """One for the whole operator; the queue sees to it that an object has one pass at a time."""

    def __init__(
        self,
        api: KubeApi,
        engines: EngineClient,
        clock: Clock,
        *,
        default_engine_image: str,
        recorder: Recorder,
    ) -> None:
        self._api = api
        self._clock = clock
        self._observer = Observer(api, engines)
        self._executor = Executor(api, clock)
        self._statuses = StatusWriter(api, clock)
        self._default_engine_image = default_engine_image
        self._recorder = recorder
        self._uids: dict[NamespacedName, str] = {}
        self._children = ChildCache(clock)
        self._recall = ScalingRecall(clock)

    def note_child_change(self, key: NamespacedName) -> None:
        """A watch told of a child of this object: what was listed before is no longer known to hold."""
        self._children.invalidate(key)

    def let_go(self) -> None:
        """Another operator may work on the objects now: what was seen of them before says nothing any more."""
        self._recall.forget_all()

    async def reconcile(self, key: NamespacedName) -> float | None:
        """One pass. Seconds until it is due again by itself, or None; an error means: try again."""
        manifest = await self._api.get_object(LLM_DEPLOYMENTS, key.namespace, key.name)
        if manifest is None or "deletionTimestamp" in manifest["metadata"]:
            self._forget(key)  # owner references do the rest
            return None
        self._uids[key] = manifest["metadata"]["uid"]
        try:
            facts = await self._observe(key, manifest)
        except InvalidSpecError as error:
            await self._statuses.write_invalid(manifest, str(error), self._read_now())
            return None
        return await self._act(facts)

    async def _observe(self, key: NamespacedName, manifest: Manifest) -> _Facts:
        spec = parse_spec(manifest)
        metadata = manifest["metadata"]
        owner = Owner(key, metadata["uid"])
        children = await self._children.get(owner, self._observer.list_children)
        tuning = read_tuning_memory(owner, children, (manifest.get("status") or {}).get("memory"))
        marks = tuning.handled if tuning is not None else ()
        observation = await self._observer.observe(owner, metadata.get("generation", 0), children, marks)
        return _Facts(
            manifest=manifest,
            owner=owner,
            spec=spec,
            children=children,
            tuning=tuning,
            observation=observation,
            now=self._read_now(),
        )

    async def _act(self, facts: _Facts) -> float | None:
        try:
            decisions = self._decide(facts)
            todo = self._plan(facts, decisions)
        except InvalidSpecError as invalid:  # found while rendering: the overlay, the model source, the image
            await self._statuses.write_invalid(facts.manifest, str(invalid), facts.now)
            return None
        if any(isinstance(action, WriteSpecReplicas) for action in todo.actions):
            # It changes the object that all else was decided from: do only that, and look again.
            await self._executor.execute(facts.owner, todo.actions[:1], facts.children, [])
            self._children.invalidate(facts.owner.key)
            return 0.0
        error: OperatorError | None = None
        done: list[Action] = []
        version = str(facts.manifest["metadata"]["resourceVersion"])
        is_scaling_kept = not facts.is_paused
        try:
            if any(isinstance(action, ScaleDeployment) for action in todo.actions):
                is_scaling_kept = False
                version = await self._remember_scaling(facts, decisions, version)
                is_scaling_kept = True
            await self._executor.execute(facts.owner, todo.actions, facts.children, done)
        except NamespaceGoingError:
            return None  # the object goes with it; there is nobody left to tell
        except OperatorError as raised:
            error = raised
        if done or error is not None:
            self._children.invalidate(facts.owner.key)
        is_memory_kept = not facts.is_paused and not any(_is_tuning_write(a) for a in todo.actions if a not in done)
        if is_memory_kept:
            self._count_ooms(facts)
        outcome = _Outcome(error, is_scaling_kept=is_scaling_kept, is_memory_kept=is_memory_kept)
        await self._write_status(facts, decisions, outcome, version)
        if error is not None and not isinstance(error, InvalidSpecError):
            raise error
        return None

    def _decide(self, facts: _Facts) -> _Decisions:
        spec, status = facts.spec, facts.status
        choice = choose_template(
            spec,
            facts.owner,
            facts.children,
            pinned_image=status.get("image", ""),
            default_image=self._default_engine_image,
            accepted=facts.annotations.get(naming.ANNOTATION_ACCEPT_UPDATE, ""),
        )
        if not choice.template.image:
            raise InvalidSpecError("spec.engine.image is not set, and the operator has no default for it")
        return _Decisions(
            scaling=self._decide_scaling(facts),
            memory=decide_memory(spec.memory, facts.observation, facts.tuning, facts.now, shape=engine_shape(spec)),
            choice=choice,
        )

    def _decide_scaling(self, facts: _Facts) -> ScalingDecision:
        spec, observation = facts.spec, facts.observation
        memory = self._recall.complete(facts.owner.uid, parse_scaling_memory(facts.status.get("scaling") or {}))
        current = observation.replicas_wanted
        is_ours = spec.scaling.mode is ScalingMode.AUTO and memory.mode == ScalingMode.AUTO
        if is_ours and not observation.foreign_scaler and current is not None and memory.desired is not None:
            # In Auto the remembered count is what is in force. Another one on the Deployment is a write of ours that
            # a crash cut off, or somebody's hand: both are drift, and the plan repairs it.
            observation = replace(observation, replicas_wanted=memory.desired)
        decision = decide_scaling(
            spec.scaling,
            observation,
            memory,
            facts.now,
            spec_replicas=spec.replicas,
            startup_timeout_s=spec.startup.timeout_seconds,
        )
        if observation.foreign_scaler and current is not None:
            # When the other scaler goes, we go on from where it left.
            decision = replace(decision, memory=replace(decision.memory, desired=current))
        return decision

    def _plan(self, facts: _Facts, decisions: _Decisions) -> ReconcilePlan:
        rendered = render_children(facts.spec, facts.owner, decisions.choice, decisions.memory.memory)
        scaling, tuning = decisions.scaling, decisions.memory.memory
        wanted = Wanted(
            replicas=scaling.replicas,
            replicas_reason=str(scaling.reason),
            spec_replicas=scaling.adopt,
            pod_annotations=plan_pod_annotations(facts.observation, tuning, scaling.replicas, facts.now),
            pod_deletions=plan_pod_deletions(facts.observation, tuning),
        )
        planned = claim_replicas(
            plan(rendered, facts.observation, wanted, self._executor.residues_of(facts.owner)),
            naming.deployment_name(facts.owner),
            scaling.replicas,
            facts.children,
        )
        # Paused: everything is observed and decided, and said, and nothing is done.
        return ReconcilePlan(conflicts=planned.conflicts) if facts.is_paused else planned

    async def _remember_scaling(self, facts: _Facts, decisions: _Decisions, version: str) -> str:
        """Before replicas are written: a crash between the two must not lower them a second time."""
        owner = facts.owner
        patch = build_merge_patch(facts.status.get("scaling") or {}, decisions.scaling.memory.to_dict())
        if not patch:
            return version
        answer = await self._api.patch_status(owner.namespace, owner.name, {"scaling": patch}, version)
        return str(answer["metadata"]["resourceVersion"])

    async def _write_status(self, facts: _Facts, decisions: _Decisions, outcome: _Outcome, version: str) -> None:
        observation, choice = facts.observation, decisions.choice
        previous = parse_status(facts.status)
        rendering = Rendering(
            selector=naming.selector_string(facts.owner.name),
            image=choice.template.image,
            template=choice.template.template_hash,
            update=choice.offered_update or "",
            is_paused=facts.is_paused,
        )
        problems = _collect_problems(facts, decisions, outcome.error)
        scaling, memory = decisions.scaling, decisions.memory
        if outcome.is_scaling_kept:
            self._recall.note(facts.owner.uid, scaling.memory)
        else:
            # Nothing was done, so nothing is to be remembered: the next pass decides the same again.
            in_force = scaling.replicas if observation.replicas_wanted is None else observation.replicas_wanted
            scaling = replace(scaling, replicas=in_force, record=None, memory=previous.scaling)
        if not outcome.is_memory_kept:
            memory = replace(memory, records=(), memory=facts.tuning or memory.memory)
        new = compute_status(observation, scaling, memory, problems, rendering, previous, facts.now)
        self._record(facts, new)
        await self._statuses.write(facts.manifest, new, version, facts.now)

    def _record(self, facts: _Facts, status: LLMDeploymentStatus) -> None:
        self._recorder.set_object(
            facts.owner.key,
            replicas={
                "desired": status.desired_replicas or 0,
                "current": status.replicas,
                "ready": status.ready_replicas,
                "unknown": facts.observation.num_unknown,
            },
            utilization=status.tuning.utilization if status.tuning is not None else None,
        )

    def _read_now(self) -> datetime:
        """Whole seconds, as the API keeps them: what is written and read back must be equal."""
        return self._clock.now().replace(microsecond=0)

    def _count_ooms(self, facts: _Facts) -> None:
        """Once the marks are written: the same events would otherwise be counted again by the next pass."""
        marks = facts.tuning.handled if facts.tuning is not None else ()
        for event in collect_events(facts.observation, marks)[0]:
            self._recorder.count_oom(facts.owner.key, str(event.ending))

    def _forget(self, key: NamespacedName) -> None:
        self._recorder.forget_object(key)
        self._children.forget(key)
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._executor.forget(uid)
            self._recall.forget(uid)


def _is_tuning_write(action: Action) -> bool:
    return isinstance(action, Apply) and action.manifest["kind"] == CONFIG_MAPS.kind


def _collect_problems(facts: _Facts, decisions: _Decisions, error: OperatorError | None) -> tuple[Problem, ...]:
    """What can be seen, what tuning knows besides, and what the API server refused."""
    problems = list(find_problems(facts.spec, facts.observation, facts.now))
    tuning = decisions.memory.memory
    if tuning.blocked_reason:
        problems.append(Problem(reason=Reason(tuning.blocked_reason), message=tuning.blocked_message))
    if isinstance(error, InvalidSpecError):
        problems.append(Problem(reason=Reason.INVALID_SPEC, message=str(error)))
    elif isinstance(error, RefusedError):
        problems.append(Problem(reason=Reason.WRITE_REFUSED, message=str(error), stops_ready=False))
    return rank_problems(problems)
