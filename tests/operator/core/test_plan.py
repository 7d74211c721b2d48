"""From rendered and observed children to actions."""

from __future__ import annotations

import copy
from typing import Any

from kvpilot_operator.core import children, naming
from kvpilot_operator.core.api_types import parse_spec
from kvpilot_operator.core.drift import ChildKey, Drift
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.observation import ChildObservation, DeploymentObservation
from kvpilot_operator.core.plan import (
    Action,
    AnnotatePod,
    Apply,
    ApplyReason,
    DeletePod,
    ReconcilePlan,
    ScaleDeployment,
    Wanted,
    WriteSpecReplicas,
    plan,
)
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.testing import make_replica

OWNER = naming.Owner(NamespacedName("ns", "llama"), "uid-1")
SPEC = parse_spec({"spec": {"model": {"source": "hf://owner/model"}}})
TEMPLATE: dict[str, Any] = {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "engine", "image": "i:1"}]}}

DEPLOYMENT = children.build_deployment(SPEC, OWNER, TEMPLATE, "hash")
SERVICE = children.build_service(SPEC, OWNER)
CONFIG_MAP = children.build_tuning_configmap(OWNER, {"tuning.json": "{}"})
PDB = children.build_pdb(OWNER)
REVISION = children.build_template_revision(OWNER, TEMPLATE, template_hash="hash", inputs_hash="in", revision=1)
RENDERED = (DEPLOYMENT, PDB, SERVICE, REVISION, CONFIG_MAP)


def observed(*manifests: Manifest, controlled: bool = True) -> tuple[ChildObservation, ...]:
    return tuple(
        ChildObservation(kind=m["kind"], name=m["metadata"]["name"], controlled=controlled, manifest=m)
        for m in manifests
    )


def make_plan(
    *found: ChildObservation,
    wanted: Wanted | None = None,
    residues: dict[ChildKey, frozenset[Drift]] | None = None,
    replicas_wanted: int | None = 1,
    **observation: Any,
) -> ReconcilePlan:
    seen = DeploymentObservation(
        generation=1,
        replicas_wanted=replicas_wanted,
        children=found,
        replicas=observation.pop("replicas", ()),
        **observation,
    )
    return plan(RENDERED, seen, wanted or Wanted(), residues or {})


def applied(actions: tuple[Action, ...]) -> list[tuple[str, ApplyReason]]:
    return [(action.manifest["kind"], action.reason) for action in actions if isinstance(action, Apply)]


def edited(manifest: Manifest) -> Manifest:
    changed = copy.deepcopy(manifest)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    return changed


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert make_plan(*observed(*RENDERED)) == ReconcilePlan()


def test_missing_children_are_made_before_what_needs_them() -> None:
    missing = ApplyReason.MISSING
    assert applied(make_plan(replicas_wanted=None).actions) == [
        ("ConfigMap", missing),
        ("ControllerRevision", missing),
        ("Service", missing),
        ("PodDisruptionBudget", missing),
        ("Deployment", missing),
    ]


def test_new_render_is_applied() -> None:
    old = children.build_service(
        parse_spec({"spec": {"model": {"source": "hf://a/b"}, "service": {"port": 80}}}), OWNER
    )
    assert applied(make_plan(*observed(DEPLOYMENT, PDB, old, REVISION, CONFIG_MAP)).actions) == [
        ("Service", ApplyReason.CHANGED)
    ]


def test_drift_is_repaired_and_named() -> None:
    """# C5"""
    (action,) = make_plan(*observed(edited(DEPLOYMENT), PDB, SERVICE, REVISION, CONFIG_MAP)).actions
    assert isinstance(action, Apply)
    assert action.reason is ApplyReason.DRIFTED
    assert action.manifest == DEPLOYMENT
    assert action.detail == "spec.template.spec.containers[engine].image"


def test_what_applying_did_not_mend_is_not_applied_again_until_it_changes() -> None:
    found = observed(edited(DEPLOYMENT), PDB, SERVICE, REVISION, CONFIG_MAP)
    place = ChildKey("Deployment", "llama")
    same = frozenset({Drift("spec.template.spec.containers[engine].image", "'other'")})
    assert make_plan(*found, residues={place: same}).actions == ()
    elsewhere = frozenset({Drift("spec.template.spec.containers[engine].image", "'third'")})
    assert applied(make_plan(*found, residues={place: elsewhere}).actions) == [("Deployment", ApplyReason.DRIFTED)]


def test_foreign_object_is_never_touched() -> None:
    foreign = observed({"kind": "Service", "metadata": {"name": "llama"}}, controlled=False)
    result = make_plan(*observed(DEPLOYMENT, PDB, REVISION, CONFIG_MAP), *foreign)
    assert result == ReconcilePlan(conflicts=(ChildKey("Service", "llama"),))


def test_nothing_runs_on_a_foreign_tuning_file() -> None:
    foreign = observed({"kind": "ConfigMap", "metadata": {"name": "llama-tuning"}}, controlled=False)
    result = make_plan(*foreign, wanted=Wanted(replicas=3), replicas_wanted=None)
    assert "Deployment" not in [kind for kind, _ in applied(result.actions)]
    assert not [action for action in result.actions if isinstance(action, ScaleDeployment)]


def test_foreign_deployment_is_not_scaled() -> None:
    foreign = observed({"kind": "Deployment", "metadata": {"name": "llama"}}, controlled=False)
    result = make_plan(*foreign, *observed(PDB, SERVICE, REVISION, CONFIG_MAP), wanted=Wanted(replicas=3))
    assert result.actions == ()


def test_lost_owner_reference_is_put_back() -> None:
    """What `kubectl delete --cascade=orphan` leaves is observed as ours; applying owns it again. # C5"""
    orphan = copy.deepcopy(SERVICE)
    orphan["metadata"]["ownerReferences"] = []
    (action,) = make_plan(*observed(DEPLOYMENT, PDB, REVISION, CONFIG_MAP, orphan)).actions
    assert isinstance(action, Apply)
    assert (action.reason, action.detail) == (ApplyReason.DRIFTED, "metadata.ownerReferences[uid-1]")


def test_replicas_are_written_only_when_they_differ() -> None:
    found = observed(*RENDERED)
    assert make_plan(*found, wanted=Wanted(replicas=1)).actions == ()
    assert make_plan(*found, wanted=Wanted(replicas=None), replicas_wanted=5).actions == ()
    (action,) = make_plan(*found, wanted=Wanted(replicas=3, replicas_reason="LoadAboveTarget")).actions
    assert action == ScaleDeployment(name="llama", replicas=3, reason="LoadAboveTarget")
    (action,) = make_plan(*found, wanted=Wanted(replicas=0)).actions
    assert action == ScaleDeployment(name="llama", replicas=0, reason="")


def test_new_deployment_is_scaled_after_it_was_made() -> None:
    actions = make_plan(wanted=Wanted(replicas=2), replicas_wanted=None).actions
    assert isinstance(actions[-1], ScaleDeployment)
    assert make_plan(wanted=Wanted(replicas=1), replicas_wanted=None).actions == actions[:-1]


def test_running_count_is_handed_over_before_anything_else() -> None:
    actions = make_plan(*observed(*RENDERED), wanted=Wanted(spec_replicas=3, replicas=2)).actions
    assert isinstance(actions[0], WriteSpecReplicas)
    assert actions[0].replicas == 3


def test_pods_get_only_what_they_lack_and_ending_ones_nothing() -> None:
    kept = make_replica(name="kept", uid="u1", annotations={"a": "1"})
    touched = make_replica(name="touched", uid="u2", annotations={"a": "0"})
    deleted = make_replica(name="deleted", uid="u3")
    ending = make_replica(name="ending", uid="u4", terminating=True)
    wanted = Wanted(
        pod_annotations={uid: {"a": "1"} for uid in ("u1", "u2", "u3", "u4")},
        pod_deletions={"u3": "CapChanged", "u4": "CapChanged"},
    )
    result = make_plan(*observed(*RENDERED), wanted=wanted, replicas=(kept, touched, deleted, ending))
    assert result.actions == (
        AnnotatePod(name="touched", uid="u2", annotations={"a": "1"}, reason="a"),
        DeletePod(name="deleted", uid="u3", reason="CapChanged"),
    )
