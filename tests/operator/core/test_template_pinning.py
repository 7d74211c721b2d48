"""Which pod template is in use: an operator upgrade alone replaces no pod. # C17"""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot_operator.core.api_types import LLMDeploymentSpec, parse_spec
from kvpilot_operator.core.children import build_template_revision
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.observation import ChildObservation
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.template_pinning import TemplateChoice, build_revision_of, choose_template, inputs_hash
from kvpilot_operator.errors import InvalidSpecError

OWNER = Owner(NamespacedName("ns", "llama"), "uid-1")


class Cluster:
    """Keeps what was stored, as the API server would, and which version of the operator runs."""

    def __init__(self) -> None:
        self.stored: dict[str, ChildObservation] = {}
        self.pinned_image = ""
        self.default_image = "engine:1"
        self.accepted = ""

    def reconcile(self, **spec: Any) -> TemplateChoice:
        choice = choose_template(
            parse(**spec),
            OWNER,
            tuple(self.stored.values()),
            pinned_image=self.pinned_image,
            default_image=self.default_image,
            accepted=self.accepted,
        )
        self.store(build_revision_of(choice, OWNER))
        self.pinned_image = choice.template.image
        return choice

    def store(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        self.stored[name] = ChildObservation(kind=manifest["kind"], name=name, controlled=True, manifest=manifest)


def parse(**spec: Any) -> LLMDeploymentSpec:
    return parse_spec({"spec": {"model": {"source": "hf://owner/model"}, **spec}})


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_same_spec_gives_the_same_template(cluster: Cluster) -> None:
    first = cluster.reconcile()
    assert first.offered_update is None
    assert cluster.reconcile() == first
    assert len(cluster.stored) == 1


@pytest.mark.parametrize(
    "live",
    [
        {"memory": {"utilization": 0.6}},
        {"scaling": {"maxReplicas": 9}},
        {"service": {"port": 80}},
        {"rollout": {"maxSurge": 1}},
        {"replicas": 3},
    ],
)
def test_what_is_applied_live_makes_no_new_template(cluster: Cluster, live: dict[str, Any]) -> None:
    assert cluster.reconcile(**live).template == cluster.reconcile().template


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"source": "hf://owner/other"}},
        {"engine": {"maxModelLen": 4096}},
        {"resources": {"limits": {"memory": "2Gi"}}},
        {"drain": {"timeoutSeconds": 5}},
        {"startup": {"timeoutSeconds": 60}},
        {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
    ],
)
def test_what_needs_a_new_pod_makes_a_new_template(cluster: Cluster, change: dict[str, Any]) -> None:
    first = cluster.reconcile()
    second = cluster.reconcile(**change)
    assert second.template.template_hash != first.template.template_hash
    assert second.template.revision == 2
    assert cluster.reconcile().template == first.template  # and back is what it was


def test_operator_upgrade_alone_changes_nothing_but_is_offered(cluster: Cluster) -> None:
    """What an older version rendered for this very spec is in store; this one renders something else."""
    older = {"metadata": {}, "spec": {"containers": [{"name": "engine", "image": "engine:1"}]}}
    manifest = build_template_revision(
        OWNER, older, template_hash="older", inputs_hash=inputs_hash(parse(), OWNER), revision=1
    )
    cluster.store(manifest)
    held = cluster.reconcile()
    assert held.template.template == older
    assert held.template.template_hash == "older"
    assert held.offered_update is not None
    assert list(cluster.stored) == ["llama-template-older"]
    cluster.accepted = held.offered_update
    accepted = cluster.reconcile()
    assert accepted.template.template != older
    assert accepted.template.revision == 2
    assert accepted.offered_update is None


def test_accepted_update_stays_and_is_no_acceptance_of_the_next(cluster: Cluster) -> None:
    cluster.reconcile()
    cluster.default_image = "engine:2"
    cluster.accepted = cluster.reconcile().offered_update or ""
    accepted = cluster.reconcile()
    assert accepted.template.template_hash == cluster.accepted
    assert cluster.reconcile() == accepted
    cluster.default_image = "engine:3"
    held = cluster.reconcile()
    assert held.template == accepted.template
    assert held.offered_update not in (None, cluster.accepted)


def test_going_back_to_an_earlier_render_is_an_update_to_accept_as_well(cluster: Cluster) -> None:
    first = cluster.reconcile()
    cluster.default_image = "engine:2"
    cluster.accepted = cluster.reconcile().offered_update or ""
    cluster.reconcile()
    cluster.default_image = "engine:1"
    assert cluster.reconcile().offered_update == first.template.template_hash
    cluster.accepted = first.template.template_hash
    back = cluster.reconcile()
    assert back.template.template_hash == first.template.template_hash
    assert back.template.revision == 3  # the stored one, with the highest number now
    assert len(cluster.stored) == 2
    assert cluster.reconcile() == back


def test_default_image_is_pinned_when_first_seen(cluster: Cluster) -> None:
    assert cluster.reconcile().template.image == "engine:1"
    cluster.default_image = "engine:2"
    held = cluster.reconcile()
    assert held.template.image == "engine:1"
    assert held.offered_update is not None
    changed = cluster.reconcile(engine={"maxNumSeqs": 8})  # nor does an edit of something else bring it
    assert changed.template.image == "engine:1"
    cluster.accepted = changed.offered_update or ""
    assert cluster.reconcile(engine={"maxNumSeqs": 8}).template.image == "engine:2"


def test_operator_that_lost_its_default_offers_no_update_to_none(cluster: Cluster) -> None:
    before = cluster.reconcile()
    cluster.default_image = ""
    assert cluster.reconcile() == before


def test_image_of_the_spec_wins(cluster: Cluster) -> None:
    cluster.reconcile()
    choice = cluster.reconcile(engine={"image": "mine:1"})
    assert choice.template.image == "mine:1"
    assert choice.offered_update is None


def test_another_objects_revision_and_a_damaged_one_are_as_if_absent(cluster: Cluster) -> None:
    first = cluster.reconcile()
    (child,) = cluster.stored.values()
    damaged = {**child.manifest, "data": None}
    cluster.stored = {
        "foreign": ChildObservation(kind=child.kind, name=child.name, controlled=False, manifest=child.manifest),
        "damaged": ChildObservation(kind=child.kind, name=child.name, controlled=True, manifest=damaged),
    }
    cluster.default_image, cluster.pinned_image = "engine:2", ""
    assert cluster.reconcile().template.image == "engine:2"
    assert first.template.image == "engine:1"


def test_hash_of_a_spec_ignores_what_has_its_default() -> None:
    """A later version's new field, with its default, must not change the hash of an old object."""
    assert inputs_hash(parse(engine={"device": "cuda", "maxNumSeqs": 64}), OWNER) == inputs_hash(parse(), OWNER)
    assert inputs_hash(parse(), OWNER) != inputs_hash(parse(), OWNER._replace(key=NamespacedName("ns", "other")))


@pytest.mark.parametrize(
    "overlay", [{"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, {"$patch": "replace"}]
)
def test_overlay_that_takes_the_engine_away_is_refused(cluster: Cluster, overlay: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="takes away the container 'engine'"):
        cluster.reconcile(podTemplate=overlay)
