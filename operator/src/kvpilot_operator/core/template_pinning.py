"""Which pod template is in use: the stored one, so that an operator upgrade alone replaces no pod (C17).

A template is stored (as a ControllerRevision) under two hashes: of the pod-relevant spec it was rendered from, which
finds it again, and of itself, which labels its pods. A new spec stores what this version renders, with the pinned
image; for a known spec what is stored holds, and what this version would render now is only offered.
Pure: reads observed children, returns a choice; storing it is an action like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.children import build_template_revision
from kvpilot_operator.core.naming import CONTAINER_ENGINE, LABEL_TEMPLATE, LABEL_TEMPLATE_INPUTS, Owner, content_hash
from kvpilot_operator.core.observation import ChildObservation
from kvpilot_operator.core.overlay import merge_pod_template
from kvpilot_operator.core.pod_template import build_pod_template
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import CONTROLLER_REVISIONS
from kvpilot_operator.core.spec_parsing import dump_dataclass
from kvpilot_operator.errors import InvalidSpecError

_POD_RELEVANT = ("model", "engine", "resources", "startup", "drain", "podTemplate")
"""Parts of the spec that a pod is made from; the others are applied without a new pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """One pod template, as rendered or as found."""

    template_hash: str
    inputs_hash: str
    revision: int
    template: Mapping[str, Any]

    @property
    def image(self) -> str:
        """Of the engine; what `status.image` pins."""
        containers = self.template.get("spec", {}).get("containers", [])
        return next((str(c.get("image", "")) for c in containers if c.get("name") == CONTAINER_ENGINE), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateChoice:
    template: StoredTemplate
    """What the Deployment is to have."""
    offered_update: str | None
    """Hash to accept for what this version would render instead; None when that is what is in use."""


def inputs_hash(spec: LLMDeploymentSpec, owner: Owner) -> str:
    """Hash of the pod-relevant spec, without what has its default: a later version's new field changes nothing."""
    spec_json = dump_dataclass(spec)
    return content_hash([owner.name, {part: spec_json[part] for part in _POD_RELEVANT if part in spec_json}])


def choose_template(
    spec: LLMDeploymentSpec,
    owner: Owner,
    children: Iterable[ChildObservation],
    *,
    pinned_image: str,
    default_image: str,
    accepted: str,
) -> TemplateChoice:
    """`pinned_image` is `status.image` (empty at first sight), `accepted` the annotation's hash (empty for none).

    Where nothing names an image the template has none, which the caller must refuse.
    """
    inputs = inputs_hash(spec, owner)
    stored = read_stored_templates(children)
    next_revision = max((template.revision for template in stored), default=0) + 1
    newest = _render(spec, owner, spec.engine.image or default_image or pinned_image, inputs, next_revision)
    known = [template for template in stored if template.inputs_hash == inputs]
    if known:
        current = max(known, key=lambda template: template.revision)
    else:
        current = _render(spec, owner, spec.engine.image or pinned_image or default_image, inputs, next_revision)
    if newest.template_hash == current.template_hash:
        return TemplateChoice(template=current, offered_update=None)
    if newest.template_hash == accepted:
        return TemplateChoice(template=newest, offered_update=None)
    return TemplateChoice(template=current, offered_update=newest.template_hash)


def read_stored_templates(children: Iterable[ChildObservation]) -> tuple[StoredTemplate, ...]:
    """Those that are ours and whole; another's object, or a damaged one, is as if it were not there."""
    found = []
    for child in children:
        labels = child.manifest.get("metadata", {}).get("labels") or {}  # type: ignore[attr-defined]
        data = child.manifest.get("data")
        template = data.get("template") if isinstance(data, Mapping) else None
        revision = child.manifest.get("revision")
        if (
            child.kind == CONTROLLER_REVISIONS.kind
            and child.controlled
            and LABEL_TEMPLATE in labels
            and LABEL_TEMPLATE_INPUTS in labels
            and isinstance(template, Mapping)
            and isinstance(revision, int)
        ):
            found.append(
                StoredTemplate(
                    template_hash=labels[LABEL_TEMPLATE],
                    inputs_hash=labels[LABEL_TEMPLATE_INPUTS],
                    revision=revision,
                    template=template,
                )
            )
    return tuple(found)


def build_revision_of(choice: TemplateChoice, owner: Owner) -> Manifest:
    """The ControllerRevision that stores the choice."""
    template = choice.template
    return build_template_revision(
        owner,
        template.template,
        template_hash=template.template_hash,
        inputs_hash=template.inputs_hash,
        revision=template.revision,
    )


def _render(spec: LLMDeploymentSpec, owner: Owner, image: str, inputs: str, revision: int) -> StoredTemplate:
    template = merge_pod_template(build_pod_template(spec, owner, image), spec.pod_template)
    if not any(c.get("name") == CONTAINER_ENGINE for c in template.get("spec", {}).get("containers", [])):
        raise InvalidSpecError(f"spec.podTemplate takes away the container {CONTAINER_ENGINE!r}")
    return StoredTemplate(
        template_hash=content_hash([inputs, template]), inputs_hash=inputs, revision=revision, template=template
    )
