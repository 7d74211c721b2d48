"""Failed starts: noted, counted by revision, retried at what they suggested, given up after three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.errors import DeviceOutOfMemoryError, OOMCause, OOMPhase
from kvpilot_engine.service.kernel_oom import count_kernel_oom_kills
from kvpilot_engine.service.start_ledger import HoldStart, StartAt, StartFailure, StartLedger, decide_start
from kvpilot_engine.service.termination import (
    MAX_MESSAGE_CHARS,
    build_termination,
    describe_failure,
    suggest_after_oom,
    write_termination,
)


def failure(**changes: Any) -> StartFailure:
    fields: dict[str, Any] = {
        "time": "2026-01-01T00:00:00Z",
        "reason": "DeviceOOMAtLoad",
        "exit_code": 71,
        "utilization": 0.9,
        "revision": 4,
        "message": "no memory",
        "suggested_utilization": 0.88,
    }
    return StartFailure(**{**fields, **changes})


def test_first_start_takes_what_is_wanted() -> None:
    assert decide_start((), 0.9, 4) == StartAt(0.9)


def test_start_after_an_oom_takes_the_suggestion() -> None:
    decision = decide_start((failure(),), 0.9, 4)
    assert isinstance(decision, StartAt)
    assert decision.utilization == 0.88
    assert "0.9" in decision.override_reason


def test_suggestion_never_raises_a_share() -> None:
    assert decide_start((failure(),), 0.5, 4) == StartAt(0.5)


def test_start_that_did_not_fit_is_not_lowered() -> None:
    assert decide_start((failure(exit_code=72, suggested_utilization=0.95),), 0.9, 4) == StartAt(0.9)


def test_three_failures_at_one_revision_hold_and_a_new_revision_starts() -> None:
    failures = (failure(), failure(), failure(message="still none"))
    decision = decide_start(failures, 0.9, 4)
    assert isinstance(decision, HoldStart)
    assert "still none" in decision.reason
    assert decide_start(failures, 0.85, 5) == StartAt(0.85)


def test_ledger_survives_a_restart_and_is_cleared_by_a_success(tmp_path: Path) -> None:
    error = DeviceOutOfMemoryError("weights", phase=OOMPhase.LOAD, cause=OOMCause.OWN)
    code, termination = describe_failure(error, utilization=0.9)
    StartLedger(tmp_path).record(code, termination, revision=4)
    again = StartLedger(tmp_path)
    assert [(f.exit_code, f.utilization, f.suggested_utilization, f.revision) for f in again.failures] == [
        (71, 0.9, 0.88, 4)
    ]
    again.clear()
    assert StartLedger(tmp_path).failures == ()


def test_codes_that_say_nothing_about_memory_are_not_noted(tmp_path: Path) -> None:
    ledger = StartLedger(tmp_path)
    for code in (64, 66, 70, 73, 74):
        ledger.record(code, build_termination("X", "x"), revision=1)
    assert StartLedger(tmp_path).failures == ()


def test_kill_by_the_kernel_is_not_held_against_the_share(tmp_path: Path) -> None:
    ledger = StartLedger(tmp_path)
    ledger.record(71, build_termination("HostOOMKilled", "x", cause="host"), revision=1)
    assert ledger.failures == ()


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("memory.events", "low 0\noom 3\noom_kill 2\n", 2),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("memory.events", "low 0\n", None),
        ("other", "oom_kill 1\n", None),
    ],
)
def test_kernel_kills_are_read_from_either_cgroup(tmp_path: Path, name: str, text: str, count: int | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert count_kernel_oom_kills(tmp_path) == count


@pytest.mark.parametrize("text", ["", "{", "[]", '{"failures": [1]}', '{"failures": [{"time": "x"}]}'])
def test_unreadable_ledger_counts_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "start-ledger.json").write_text(text)
    assert StartLedger(tmp_path).failures == ()


def test_folder_that_can_t_be_written_does_not_stop_anything(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ledger = StartLedger(blocked / "state")
    ledger.record(71, build_termination("DeviceOOMAtLoad", "x", utilization=0.9), revision=1)
    assert len(ledger.failures) == 1
    write_termination(blocked / "log", build_termination("X", "x"))


@pytest.mark.parametrize(
    ("utilization", "requested", "limit", "suggested"),
    [
        (0.9, None, None, 0.88),
        (0.9, 1, 10_000, 0.88),
        (0.9, 10, 90, 0.8),
        (0.9, 90, 90, 0.675),
        (0.03, None, None, 0.02),
    ],
)
def test_suggestion_goes_down_by_the_evidence(
    utilization: float, requested: int | None, limit: int | None, suggested: float
) -> None:
    assert suggest_after_oom(utilization, requested, limit) == pytest.approx(suggested)


def test_long_message_stays_one_readable_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_termination(log, build_termination("InternalError", "é\n" * 5000))
    assert len(log.read_bytes()) < 4096 * 2
    assert log.read_text().count("\n") == 1
    assert MAX_MESSAGE_CHARS < 4096
