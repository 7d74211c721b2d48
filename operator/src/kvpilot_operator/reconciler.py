"""One pass over one object: observe → decide → plan → apply → status. Level-triggered, and safe to cut short anywhere.

Knows no client and no framework: it is given ports. Nothing that matters is remembered here; what the loops must know
of the past is read from the tuning ConfigMap and the object's status. Order of writes: the cap with its handled events
(one ConfigMap write), the other children, what scaling remembers, the replicas, the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvpilot_operator.core import naming
from kvpilot_operator.core.api_types import LLMDeploymentSpec, ScalingMode, parse_spec
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.memory import MemoryDecision, decide_memory, engine_shape
from kvpilot_operator.core.memory_events import collect_events
from kvpilot_operator.core.merge_patch import build_merge_patch
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.observation import ChildObservation, DeploymentObservation
from kvpilot_operator.core.plan import ReconcilePlan, ScaleDeployment, Wanted, WriteSpecReplicas, plan
from kvpilot_operator.core.pod_care import plan_pod_annotations, plan_pod_deletions
from kvpilot_operator.core.ports import Clock, EngineClient, KubeApi, Manifest, Recorder
from kvpilot_operator.core.rendering import read_tuning_memory, render_children
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS
from kvpilot_operator.core.scaling import ScalingDecision, decide_scaling
from kvpilot_operator.core.scaling_memory import parse_scaling_memory
from kvpilot_operator.core.template_pinning import TemplateChoice, choose_template
from kvpilot_operator.core.tuning_memory import TuningMemory
from kvpilot_operator.errors import InvalidSpecError, OperatorError
from kvpilot_operator.executor import Executor
from kvpilot_operator.observer import Observer


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
        self._default_engine_image = default_engine_image
        self._recorder = recorder
        self._uids: dict[NamespacedName, str] = {}

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
            await self._write_invalid(key, manifest, str(error))
            return None
        return await self._act(facts)

    async def _observe(self, key: NamespacedName, manifest: Manifest) -> _Facts:
        spec = parse_spec(manifest)
        metadata = manifest["metadata"]
        owner = Owner(key, metadata["uid"])
        children = await self._observer.list_children(owner)
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
            now=self._clock.now(),
        )

    async def _act(self, facts: _Facts) -> float | None:
        error: OperatorError | None = None
        todo = ReconcilePlan()
        decisions: _Decisions | None = None
        version = facts.manifest["metadata"]["resourceVersion"]
        try:
            decisions = self._decide(facts)
            todo = self._plan(facts, decisions)
            if any(isinstance(action, WriteSpecReplicas) for action in todo.actions):
                # It changes the object that all else was decided from: do only that, and look again.
                await self._executor.execute(facts.owner, todo.actions[:1], facts.children)
                return 0.0
            if any(isinstance(action, ScaleDeployment) for action in todo.actions):
                version = await self._remember_scaling(facts, decisions, version)
            await self._executor.execute(facts.owner, todo.actions, facts.children)
            self._count_ooms(facts)
        except OperatorError as raised:
            error = raised
        await self._write_status(facts, decisions, todo, error, version)
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
        memory = parse_scaling_memory(facts.status.get("scaling") or {})
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
        planned = plan(rendered, facts.observation, wanted, self._executor.residues_of(facts.owner))
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

    async def _write_status(
        self,
        facts: _Facts,
        decisions: _Decisions | None,
        todo: ReconcilePlan,
        error: OperatorError | None,
        version: str,
    ) -> None:
        status = dict(facts.status)
        if decisions is not None:
            status.update(
                {
                    "image": decisions.choice.template.image,
                    "selector": naming.selector_string(facts.owner.name),
                    "replicas": len(facts.observation.live),
                    "readyReplicas": facts.observation.num_ready,
                    "desiredReplicas": decisions.scaling.desired,
                    "scaling": decisions.scaling.memory.to_dict(),
                    "memory": decisions.memory.memory.to_dict(),
                }
            )
        patch = build_merge_patch(facts.status, status)
        if patch:
            await self._api.patch_status(facts.owner.namespace, facts.owner.name, patch, version)

    async def _write_invalid(self, key: NamespacedName, manifest: Manifest, message: str) -> None:
        pass

    def _count_ooms(self, facts: _Facts) -> None:
        """Once the marks are written: the same events would otherwise be counted again by the next pass."""
        marks = facts.tuning.handled if facts.tuning is not None else ()
        for event in collect_events(facts.observation, marks)[0]:
            self._recorder.count_oom(facts.owner.key, str(event.ending))

    def _forget(self, key: NamespacedName) -> None:
        self._recorder.forget_object(key)
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._executor.forget(uid)
