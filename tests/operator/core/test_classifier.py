"""Each way in which a container ends or waits has one class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.core.classifier import (
    REASON_OF_ENDING,
    Ending,
    classify,
    classify_waiting,
    parse_termination_message,
)
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.testing import make_termination

CONTRACT = Path(__file__).parents[3] / "docs" / "contracts" / "engine-http.md"


@pytest.mark.parametrize(
    ("exit_code", "reason", "report", "ending"),
    [
        (0, "Completed", None, Ending.DRAINED),
        (64, "Error", {"reason": "InvalidSettings"}, Ending.INVALID_SETTINGS),
        (66, "Error", {"reason": "ModelNotFound"}, Ending.MODEL_NOT_FOUND),
        (66, "Error", {"reason": "ModelAccessDenied"}, Ending.MODEL_ACCESS_DENIED),
        (70, "Error", {"reason": "InternalError"}, Ending.INTERNAL_ERROR),
        (71, "Error", {"reason": "DeviceOOMAtLoad", "cause": "own"}, Ending.DEVICE_OOM_AT_LOAD),
        (71, "Error", None, Ending.DEVICE_OOM_AT_LOAD),
        (71, "Error", {"cause": "neighbour"}, Ending.CONTENDED),
        (72, "Error", {"reason": "ModelDoesNotFit"}, Ending.DOES_NOT_FIT),
        (73, "Error", {"reason": "DeviceMemoryContended"}, Ending.CONTENDED),
        (74, "Error", {"reason": "DeviceOOMWhileServing", "cause": "own"}, Ending.DEVICE_OOM_SERVING),
        (74, "Error", {"cause": "host"}, Ending.HOST_OOM),
        (75, "Error", None, Ending.DEVICE_FAULT),
        (137, "OOMKilled", None, Ending.HOST_OOM),
        (137, "Error", None, Ending.KILLED),
        (143, "Error", None, Ending.KILLED),
        (1, "Error", None, Ending.CRASHED),
        (139, "Error", None, Ending.CRASHED),
        (128, "ContainerCannotRun", None, Ending.CRASHED),
        # The kernel killed one of our processes and the parent told of it with its own code.
        (70, "OOMKilled", {"reason": "InternalError"}, Ending.HOST_OOM),
    ],
)
def test_an_ended_run_has_one_class(  # C27
    exit_code: int, reason: str, report: dict[str, Any] | None, ending: Ending
) -> None:
    assert classify(make_termination(exit_code, reason=reason, report=report)) is ending


def test_an_evicted_pod_is_evicted_whatever_its_container_says() -> None:  # C27
    assert classify(make_termination(137), pod_reason="Evicted") is Ending.EVICTED
    assert classify(make_termination(71), pod_reason="Evicted") is Ending.EVICTED


@settings(deadline=None)
@given(st.integers(0, 255), st.sampled_from(["OOMKilled", "Error", "Completed"]), st.text(max_size=40))
def test_only_the_engines_own_word_is_a_device_oom(exit_code: int, reason: str, message: str) -> None:  # C27
    ending = classify(make_termination(exit_code, reason=reason, message=message))
    assert not ending.is_own_device_oom or (exit_code in (71, 74) and reason != "OOMKilled")


def test_every_ending_but_a_drained_one_has_a_reason() -> None:
    assert set(REASON_OF_ENDING) == set(Ending) - {Ending.DRAINED}


def test_every_exit_code_of_the_contract_is_known() -> None:
    rows = [line.split("|")[1].strip() for line in CONTRACT.read_text(encoding="utf-8").splitlines() if "|" in line]
    codes = [int(cell) for cell in rows if cell.isdigit()]
    assert len(codes) >= 9
    assert all(classify(make_termination(code)) is not Ending.CRASHED for code in codes)


def test_the_last_words_are_read() -> None:
    report = parse_termination_message(
        json.dumps(
            {
                "reason": "ModelDoesNotFit",
                "phase": "load",
                "cause": None,
                "message": "needs 3 GiB",
                "requested_bytes": 3000,
                "limit_bytes": 2000,
                "free_bytes": None,
                "utilization": 0.5,
                "suggested": {"utilization": 1.2, "max_model_len": 512},
                "oom_seq": 4,
            }
        )
    )
    assert (report.reason, report.phase, report.cause, report.message) == (
        "ModelDoesNotFit",
        "load",
        "",
        "needs 3 GiB",
    )
    assert (report.requested_bytes, report.limit_bytes, report.free_bytes) == (3000, 2000, None)
    assert (report.utilization, report.suggested_utilization, report.suggested_max_model_len) == (0.5, 1.2, 512)
    assert report.oom_seq == 4


def test_other_lines_before_the_last_words_do_no_harm() -> None:
    assert parse_termination_message('Warning: x\n{"reason": "InternalError"}\n').reason == "InternalError"


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Killed",
        '{"reason": "Dev',
        "[1, 2]",
        "null",
        '{"utilization": "0.9", "requested_bytes": -1, "suggested": 3}',
    ],
)
def test_what_is_no_report_has_no_numbers(message: str) -> None:
    report = parse_termination_message(message)
    assert (report.utilization, report.requested_bytes, report.suggested_utilization) == (None, None, None)


def test_numbers_that_are_none_are_none() -> None:
    report = parse_termination_message('{"utilization": NaN, "limit_bytes": Infinity, "requested_bytes": true}')
    assert (report.utilization, report.limit_bytes, report.requested_bytes) == (None, None, None)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_can_be_read(message: str) -> None:
    parse_termination_message(message)


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "x"', Reason.IMAGE_PULL_ERROR),
        ("ErrImagePull", "", Reason.IMAGE_PULL_ERROR),
        ("InvalidImageName", "", Reason.IMAGE_PULL_ERROR),
        ("CreateContainerConfigError", 'secret "hf-token" not found', Reason.CONTAINER_CONFIG_ERROR),
        ("ContainerCreating", 'MountVolume.SetUp failed for volume "m"', Reason.VOLUME_UNAVAILABLE),
        ("CrashLoopBackOff", "back-off 40s", Reason.CRASH_LOOP),
        ("ContainerCreating", "", None),
        ("PodInitializing", "", None),
        ("", "", None),
    ],
)
def test_a_waiting_container_says_why(reason: str, message: str, expected: Reason | None) -> None:
    assert classify_waiting(reason, message) is expected
