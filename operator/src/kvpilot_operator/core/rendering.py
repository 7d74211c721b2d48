"""All children of one object as they should be now. Pure: joins the builders, decides nothing."""

from __future__ import annotations

import json

from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.children import build_deployment, build_pdb, build_service, build_tuning_configmap
from kvpilot_operator.core.naming import TUNING_KEY, Owner, tuning_config_map_name
from kvpilot_operator.core.observation import ChildObservation
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import CONFIG_MAPS
from kvpilot_operator.core.template_pinning import TemplateChoice, build_revision_of
from kvpilot_operator.core.tuning_memory import (
    TuningMemory,
    build_tuning_file,
    dump_tuning_memory,
    load_tuning_memory,
    parse_tuning_memory,
)

MEMORY_KEY = "memory.json"
"""Beside the engine's file in the tuning ConfigMap: one write changes the cap and what led to it, or neither."""


def render_children(
    spec: LLMDeploymentSpec, owner: Owner, choice: TemplateChoice, memory: TuningMemory
) -> tuple[Manifest, ...]:
    """Every child, in no particular order."""
    template = choice.template
    data = {
        TUNING_KEY: json.dumps(build_tuning_file(memory), sort_keys=True),
        MEMORY_KEY: dump_tuning_memory(memory),
    }
    return (
        build_tuning_configmap(owner, data),
        build_revision_of(choice, owner),
        build_service(spec, owner),
        build_pdb(owner),
        build_deployment(spec, owner, template.template, template.template_hash),
    )


def read_tuning_memory(
    owner: Owner, children: tuple[ChildObservation, ...], status_memory: object
) -> TuningMemory | None:
    """What tuning remembers: the ConfigMap's word, and when that is gone or damaged the status'."""
    name = tuning_config_map_name(owner)
    for child in children:
        if child.kind == CONFIG_MAPS.kind and child.name == name and child.controlled:
            data = child.manifest.get("data")
            text = data.get(MEMORY_KEY) if isinstance(data, dict) else None
            memory = load_tuning_memory(text) if isinstance(text, str) else None
            if memory is not None:
                return memory
    return parse_tuning_memory(status_memory) if isinstance(status_memory, dict) else None
