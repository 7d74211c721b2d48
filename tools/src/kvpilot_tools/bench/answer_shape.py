"""What two answers of different servers can be compared by: status, structure and counts. Pure.

The structure of a JSON value is the set of its paths with the kinds found there; lists are `[]`, and objects whose keys
are data (token texts, token ids) are `{}`. Of a stream it is the union over its events. Texts, ids and times are no
part of it, so that an answer describes itself the same on every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_KEYED_BY_DATA = ("top_logprobs", "prompt_logprobs", "logit_bias")
_OPAQUE_PATHS = ("/metrics", "/openapi.json")
"""Bodies that are compared elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """One answer, described."""

    status: int
    kind: str
    """`json`, `stream`, `empty` or `other`."""
    paths: Mapping[str, str]
    """Path → kinds, joined by `|` in order of the alphabet."""
    counts: Mapping[str, Any]
    """Finish reasons, numbers of choices and tokens, whether a stream ended with [DONE]."""


def describe_answer(path: str, status: int, content_type: str, body: bytes) -> AnswerShape:
    """Describe a whole body."""
    if path in _OPAQUE_PATHS or not body:
        return AnswerShape(status=status, kind="other" if body else "empty", paths={}, counts={})
    if content_type.startswith("text/event-stream"):
        return _describe_stream(status, body)
    try:
        value = json.loads(body)
    except ValueError:
        return AnswerShape(status=status, kind="other", paths={}, counts={})
    return AnswerShape(status=status, kind="json", paths=_join(_walk("", value)), counts=_count(value))


def _describe_stream(status: int, body: bytes) -> AnswerShape:
    data = [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")]
    events = [json.loads(part) for part in data if part != b"[DONE]"]
    counts: dict[str, Any] = {"done": data[-1:] == [b"[DONE]"]}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                reasons[choice["index"]] = choice["finish_reason"]
        counts |= _usage(event)
        counts["usage_only_event"] = counts.get("usage_only_event", False) or event.get("choices") == []
    counts["finish_reasons"] = [reasons[index] for index in sorted(reasons)]
    pairs = [pair for event in events for pair in _walk("", event)]
    return AnswerShape(status=status, kind="stream", paths=_join(pairs), counts=counts)


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    yield path or ".", _kind(value)
    if isinstance(value, dict):
        data_keys = path.rpartition(".")[2].removesuffix("[]") in _KEYED_BY_DATA
        for key, item in value.items():
            yield from _walk(f"{path}{{}}" if data_keys else f"{path}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(f"{path}[]", item)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "bool"), (int, "number"), (float, "number"), (str, "string"), (list, "list"), (dict, "object"))
    return next(name for kind, name in kinds if isinstance(value, kind))


def _join(pairs: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for path, kind in pairs:
        found.setdefault(path, set()).add(kind)
    return {path: "|".join(sorted(kinds)) for path, kinds in sorted(found.items())}


def _count(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    counts = _usage(value)
    choices = value.get("choices")
    if isinstance(choices, list):
        counts["finish_reasons"] = [choice.get("finish_reason") for choice in choices]
    for name in ("count", "max_model_len"):
        if isinstance(value.get(name), int):
            counts[name] = value[name]
    return counts


def _usage(value: Mapping[str, Any]) -> dict[str, Any]:
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return {}
    return {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
