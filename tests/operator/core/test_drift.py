"""Drift: what we wrote must still be there, what others added may stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvpilot_operator.core.drift import ChildKey, Drift, Residues, find_drift

RENDERED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "llama", "labels": {"a": "1"}, "ownerReferences": [{"uid": "u", "controller": True}]},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "args": ["--a", "1"],
                "env": [{"name": "A", "value": "1"}],
                "ports": [{"containerPort": 8000, "name": "http"}],
                "resources": {"limits": {"cpu": 1, "memory": "1.5Gi"}},
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1073741824"}}],
    },
}


def changed(path: list[Any], value: object) -> dict[str, Any]:
    result = copy.deepcopy(RENDERED)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return result


ENGINE = ["spec", "containers", 0]


@pytest.mark.parametrize(
    "observed",
    [
        RENDERED,
        changed(["status"], {"replicas": 1}),
        changed(["spec", "replicas"], 3),
        changed(["metadata", "labels"], {"a": "1", "theirs": "2"}),
        changed(["spec", "containers"], [{"name": "injected"}, RENDERED["spec"]["containers"][0]]),
        changed([*ENGINE, "env"], [{"name": "Z"}, {"name": "A", "value": "1"}]),
        changed([*ENGINE, "ports"], [{"containerPort": 8000, "name": "http", "protocol": "TCP"}]),
        changed([*ENGINE, "resources", "limits"], {"cpu": "1000m", "memory": "1536Mi"}),
        changed(["spec", "volumes"], [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]),
        changed(["metadata", "ownerReferences"], [{"uid": "other"}, {"uid": "u", "controller": True}]),
    ],
)
def test_what_others_add_and_the_server_rewrites_is_no_drift(observed: dict[str, Any]) -> None:
    assert find_drift(RENDERED, observed) == frozenset()


@pytest.mark.parametrize(
    ("observed", "path"),
    [
        (changed(["metadata", "labels"], {}), "metadata.labels.a"),
        (changed(["metadata"], {"name": "llama", "labels": {"a": "1"}}), "metadata.ownerReferences[u]"),
        (changed([*ENGINE, "args"], ["--a", "2"]), "spec.containers[engine].args[1]"),
        (changed([*ENGINE, "args"], ["--a", "1", "--b"]), "spec.containers[engine].args"),
        (changed([*ENGINE, "env"], []), "spec.containers[engine].env[A]"),
        (changed(["spec", "containers"], None), "spec.containers[engine]"),
        (changed([*ENGINE, "resources", "limits", "cpu"], 2), "spec.containers[engine].resources.limits.cpu"),
        (
            changed([*ENGINE, "ports"], [{"containerPort": 8000, "name": "h"}]),
            "spec.containers[engine].ports[8000].name",
        ),
        (changed(["spec", "volumes"], [{"name": "shm", "hostPath": {}}]), "spec.volumes[shm].emptyDir"),
    ],
)
def test_what_was_changed_or_removed_is_drift_at_its_path(observed: dict[str, Any], path: str) -> None:
    assert [drift.path for drift in find_drift(RENDERED, observed)] == [path]


def test_quantities_are_numbers_only_where_quantities_are() -> None:
    rendered, observed = {"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1000m"}]}
    assert find_drift(rendered, observed) == {Drift("env[A].value", "'1000m'")}


def test_residues_remember_what_an_apply_did_not_mend() -> None:
    residues = Residues()
    answer = changed([*ENGINE, "args"], ["--a", "rewritten"])
    residues.record("uid", RENDERED, answer)
    assert residues.of_owner("uid") == {ChildKey("Deployment", "llama"): find_drift(RENDERED, answer)}
    assert residues.of_owner("other") == {}
    residues.record("uid", RENDERED, RENDERED)
    assert residues.of_owner("uid") == {}
    residues.record("uid", RENDERED, answer)
    residues.forget("uid")
    assert residues.of_owner("uid") == {}
