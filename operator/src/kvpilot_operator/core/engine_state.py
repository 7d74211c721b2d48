"""Parse one `GET /engine/state` body into `EngineState`, or say why it can't be trusted.

Does no I/O and raises nothing: whatever is missing, not finite, out of range or of another type becomes
`Unknown(reason)`. The reasons are few and fixed, since they label a metric and show in status. A part that the engine
does not have yet (null while loading) is `Unknown` on its own and spoils nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvpilot_operator.core.observation import (
    EngineLoad,
    EngineMemory,
    EngineOOM,
    EngineState,
    EngineTuning,
    StartFailure,
    Unknown,
)

NOT_JSON = "NotJSON"
NOT_AN_OBJECT = "NotAnObject"
EMPTY_BODY = "EmptyBody"
UNSUPPORTED_SCHEMA = "UnsupportedSchema"
MISSING_VALUE = "MissingValue"
BAD_VALUE = "BadValue"
OUT_OF_RANGE = "OutOfRange"
NOT_YET_KNOWN = "NotYetKnown"

_STATES = frozenset({"loading", "ready", "draining", "held", "failed"})
_MAX_EVENTS = 256

_T = TypeVar("_T")


class _Bad(Exception):  # noqa: N818 - control flow inside this module, never an error that leaves it
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_engine_state(body: bytes) -> EngineState | Unknown:
    """The state that `body` tells, or the reason why it tells nothing."""
    if not body.strip():
        return Unknown(EMPTY_BODY)
    try:
        raw = json.loads(body, parse_constant=_refuse_constant)
    except _Bad as bad:
        return Unknown(bad.reason)
    except (ValueError, RecursionError):
        return Unknown(NOT_JSON)
    if not isinstance(raw, dict):
        return Unknown(NOT_AN_OBJECT)
    if raw.get("schema") != 1:
        return Unknown(UNSUPPORTED_SCHEMA)
    try:
        return _parse_state(raw)
    except _Bad as bad:
        return Unknown(bad.reason)


def _parse_state(raw: Mapping[str, object]) -> EngineState:
    state = _text(raw, "state")
    if state not in _STATES:
        raise _Bad(BAD_VALUE)
    age = raw.get("snapshot_age_s")
    return EngineState(
        state=state,
        state_reason=_optional_text(raw, "state_reason"),
        load=Unknown(NOT_YET_KNOWN) if age is None else _part(raw, "load", lambda part: _load(part, _seconds(raw))),
        memory=_part(raw, "memory", _memory),
        tuning=_part(raw, "tuning", _tuning),
        oom_seq=_count(raw, "oom_seq"),
        oom_events=tuple(_oom(item) for item in _objects(raw, "oom_events")),
        start_failures=tuple(_start_failure(item) for item in _objects(raw, "start_failures")),
    )


def _part(raw: Mapping[str, object], key: str, parse: Callable[[Mapping[str, object]], _T]) -> _T | Unknown:
    """One nullable part; its own trouble stays its own."""
    value = raw.get(key)
    if value is None:
        return Unknown(NOT_YET_KNOWN)
    if not isinstance(value, dict):
        return Unknown(BAD_VALUE)
    try:
        return parse(value)
    except _Bad as bad:
        return Unknown(bad.reason)


def _load(raw: Mapping[str, object], age_s: float) -> EngineLoad:
    return EngineLoad(
        kv_usage_ratio=_ratio(raw, "kv_usage_ratio"),
        running=_count(raw, "running"),
        waiting=_count(raw, "waiting"),
        waiting_capacity=_count(raw, "waiting_capacity"),
        preemptions_total=_count(raw, "preemptions_total"),
        blocks_total=_count(raw, "blocks_total"),
        age_s=age_s,
    )


def _memory(raw: Mapping[str, object]) -> EngineMemory:
    return EngineMemory(
        device=_text(raw, "device"),
        device_total_bytes=_count(raw, "device_total_bytes"),
        device_free_bytes=_count(raw, "device_free_bytes"),
        utilization=_ratio(raw, "utilization"),
        limit_bytes=_count(raw, "limit_bytes"),
        weights_bytes=_count(raw, "weights_bytes"),
        activations_peak_bytes=_count(raw, "activations_peak_bytes"),
        kv_reserved_bytes=_count(raw, "kv_reserved_bytes"),
        kv_tokens=_count(raw, "kv_tokens"),
        max_model_len=_count(raw, "max_model_len"),
        min_utilization=_non_negative(raw, "min_utilization"),
        max_concurrency_at_max_len=_non_negative(raw, "max_concurrency_at_max_len"),
    )


def _tuning(raw: Mapping[str, object]) -> EngineTuning:
    return EngineTuning(
        revision=_count(raw, "revision"),
        state=_text(raw, "state"),
        utilization=_ratio(raw, "utilization"),
        reason=_optional_text(raw, "reason"),
    )


def _oom(raw: Mapping[str, object]) -> EngineOOM:
    survived = raw.get("survived")
    if not isinstance(survived, bool):
        raise _Bad(BAD_VALUE)
    return EngineOOM(
        seq=_count(raw, "seq"),
        phase=_text(raw, "phase"),
        cause=_text(raw, "cause"),
        utilization=_ratio(raw, "utilization"),
        survived=survived,
        message=_optional_text(raw, "message"),
        requested_bytes=_optional_count(raw, "requested_bytes"),
        limit_bytes=_optional_count(raw, "limit_bytes"),
        free_bytes=_optional_count(raw, "free_bytes"),
    )


def _start_failure(raw: Mapping[str, object]) -> StartFailure:
    return StartFailure(
        reason=_text(raw, "reason"),
        exit_code=_count(raw, "exit_code"),
        utilization=_ratio(raw, "utilization"),
        revision=_count(raw, "revision"),
        message=_optional_text(raw, "message"),
    )


def _refuse_constant(_: str) -> float:
    """NaN and the infinities compare false with everything and would look like a low load."""
    raise _Bad(BAD_VALUE)


def _number(raw: Mapping[str, object], key: str) -> float:
    value = raw.get(key)
    if value is None:
        raise _Bad(MISSING_VALUE)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Bad(BAD_VALUE)
    return value


def _non_negative(raw: Mapping[str, object], key: str) -> float:
    value = _number(raw, key)
    if value < 0:
        raise _Bad(OUT_OF_RANGE)
    return float(value)


def _ratio(raw: Mapping[str, object], key: str) -> float:
    value = _number(raw, key)
    if not 0.0 <= value <= 1.0:
        raise _Bad(OUT_OF_RANGE)
    return float(value)


def _seconds(raw: Mapping[str, object]) -> float:
    return _non_negative(raw, "snapshot_age_s")


def _count(raw: Mapping[str, object], key: str) -> int:
    value = _number(raw, key)
    if value != int(value):
        raise _Bad(BAD_VALUE)
    if value < 0:
        raise _Bad(OUT_OF_RANGE)
    return int(value)


def _optional_count(raw: Mapping[str, object], key: str) -> int | None:
    return None if raw.get(key) is None else _count(raw, key)


def _text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    if value is None:
        raise _Bad(MISSING_VALUE)
    if not isinstance(value, str):
        raise _Bad(BAD_VALUE)
    return value


def _optional_text(raw: Mapping[str, object], key: str) -> str:
    return "" if raw.get(key) is None else _text(raw, key)


def _objects(raw: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_EVENTS or not all(isinstance(item, dict) for item in value):
        raise _Bad(BAD_VALUE)
    return value
