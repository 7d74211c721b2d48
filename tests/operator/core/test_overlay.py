"""The overlay on the pod template; what it merges like is held against the API server in tests/operator/api."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.core.drift import find_drift
from kvpilot_operator.core.overlay import merge_pod_template
from kvpilot_operator.errors import InvalidSpecError

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "securityContext": {"runAsUser": 1, "fsGroup": 2},
        "containers": [{"name": "engine", "args": ["x"], "env": [{"name": "A", "value": "1"}]}],
    },
}


def test_elements_merge_by_their_key_and_new_ones_go_behind() -> None:
    overlay = {
        "spec": {
            "containers": [
                {"name": "sidecar", "image": "s"},
                {"name": "engine", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "9"}]},
            ]
        }
    }
    engine, sidecar = merge_pod_template(BASE, overlay)["spec"]["containers"]
    assert engine == {
        "name": "engine",
        "args": ["x"],
        "env": [{"name": "A", "value": "9"}, {"name": "B", "value": "2"}],
    }
    assert sidecar == {"name": "sidecar", "image": "s"}


def test_neither_side_is_changed() -> None:
    base, overlay = copy.deepcopy(BASE), {"spec": {"containers": [{"name": "engine", "env": [{"name": "B"}]}]}}
    before = copy.deepcopy(overlay)
    merge_pod_template(base, overlay)
    assert (base, overlay) == (BASE, before)


def test_null_removes() -> None:
    merged = merge_pod_template(BASE, {"spec": {"securityContext": {"runAsUser": None}}})
    assert merged["spec"]["securityContext"] == {"fsGroup": 2}


def test_label_named_like_a_list_is_just_a_label() -> None:
    merged = merge_pod_template(BASE, {"metadata": {"labels": {"volumes": "x", "env": "y"}}})
    assert merged["metadata"]["labels"] == {"a": "1", "volumes": "x", "env": "y"}


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        ({"spec": {"volumes": {"name": "a"}}}, "spec.podTemplate.spec.volumes must be a list"),
        (
            {"spec": {"volumes": [{"hostPath": {}}]}},
            r"spec.podTemplate.spec.volumes\[0\] must have 'name'",
        ),
        ({"spec": {"volumes": ["a"]}}, r"volumes\[0\] must be an object"),
        ({"spec": {"$retainKeys": ["a"], "b": 1}}, r"spec.podTemplate.spec.\$retainKeys must name every field"),
        ({"spec": {"$setElementOrder/env": []}}, r"spec.podTemplate.spec.\$setElementOrder/env is a directive"),
        ({"spec": {"$patch": "remove"}}, r"\$patch must be merge, replace or delete"),
        ({"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "$patch": 3}]}]}}, r"\$patch must be"),
    ],
)
def test_what_can_not_be_merged_is_refused_with_its_path(overlay: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpecError, match=words):
        merge_pod_template(BASE, overlay)


_SCALARS = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b"]), st.booleans())
_NAMES = st.sampled_from(["a", "b", "c"])


def named(**inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    element = st.fixed_dictionaries({"name": _NAMES}, optional={"value": _SCALARS, **inner})
    return st.lists(element, max_size=3, unique_by=lambda item: str(item["name"]))


POD_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": st.dictionaries(_NAMES, _SCALARS, max_size=3),
        "tolerations": st.lists(st.dictionaries(_NAMES, _SCALARS, max_size=2), max_size=2),
        "containers": named(env=named(), command=st.lists(_NAMES, max_size=2)),
        "volumes": named(),
    },
)


@settings(deadline=None)
@given(POD_SPECS, POD_SPECS)
def test_merging_twice_is_merging_once(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    once = merge_pod_template(base, overlay)
    assert merge_pod_template(once, overlay) == once


@settings(deadline=None)
@given(POD_SPECS, POD_SPECS)
def test_all_of_the_overlay_is_in_the_result(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    assert find_drift(overlay, merge_pod_template(base, overlay)) == frozenset()


@settings(deadline=None)
@given(POD_SPECS)
def test_empty_sides_change_nothing(template: dict[str, Any]) -> None:
    assert merge_pod_template(template, {}) == template
    assert merge_pod_template({}, template) == template
