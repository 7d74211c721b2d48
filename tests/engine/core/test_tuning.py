"""The tuning file's text: which share is meant, and what is no tuning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot_engine.core.tuning import TuningError, parse_tuning

FULL = {"revision": 7, "memory_utilization": {"default": 0.9, "devices": {"cpu": 0.88}, "pods": {"uid-1": 0.92}}}


@pytest.mark.parametrize(
    ("pod_uid", "device", "share"),
    [("uid-1", "cpu", 0.92), ("uid-2", "cpu", 0.88), ("", "cpu", 0.88), ("uid-2", "NVIDIA H100", 0.9)],
)
def test_pod_wins_over_device_over_default(pod_uid: str, device: str, share: float) -> None:
    tuning = parse_tuning(json.dumps(FULL))
    assert tuning.revision == 7
    assert tuning.value_for(pod_uid, device) == share


def test_file_without_a_value_for_this_process_says_none() -> None:
    assert parse_tuning('{"revision": 1}').value_for("uid", "cpu") is None


def test_unknown_keys_are_ignored() -> None:
    assert parse_tuning(json.dumps({**FULL, "later": 1})).value_for("", "x") == 0.9


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"revision": "7"}, "revision"),
        ({"revision": -1}, "revision"),
        ({"revision": True}, "revision"),
        ({"memory_utilization": []}, "memory_utilization"),
        ({"memory_utilization": {"default": 0}}, "default"),
        ({"memory_utilization": {"default": 1.01}}, "default"),
        ({"memory_utilization": {"default": "0.9"}}, "default"),
        ({"memory_utilization": {"devices": {"cpu": None}}}, "cpu"),
        ({"memory_utilization": {"pods": [1]}}, "pods"),
    ],
)
def test_bad_file_is_refused_as_a_whole(change: dict[str, Any], word: str) -> None:
    with pytest.raises(TuningError, match=word):
        parse_tuning(json.dumps({**FULL, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"revision": 1, "memory_utilization": {"default": NaN}}'])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(TuningError):
        parse_tuning(text)
