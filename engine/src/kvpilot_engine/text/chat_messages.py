"""Brings the messages of a chat request into the one form that templates can take.

    content   "text" | null | absent | [] | ["a", {"type": "text", "text": "b"}]   →   a string
    tool_calls[].function.arguments   JSON text → the object that templates expect

Agent loops send all of these back to us, so all are accepted; what is refused is named by its place.
Not here: rendering (`chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.text_validation import require_encodable

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Templates build markers from the role (`<|` + role + `|>`), so it can't be free text."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text → the key that holds it."""


def normalize_messages(messages: Iterable[object]) -> list[dict[str, object]]:
    """Return new messages; raises InvalidRequestError with the place of the first bad value in `param`."""
    normalized = [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not normalized:
        raise InvalidRequestError("messages is empty; at least one message is needed", param="messages")
    return normalized


def _normalize_message(message: object, place: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{place} must be an object", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{place}.role is {role!r:.40}; it must be one of {', '.join(sorted(ROLES))}", param=f"{place}.role"
        )
    require_encodable(dict(message), place)
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _join_content(message.get("content"), f"{place}.content")
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = _normalize_tool_calls(calls, f"{place}.tool_calls")
    return kept


def _join_content(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_read_part(part, f"{place}[{index}]") for index, part in enumerate(content))
    raise InvalidRequestError(f"{place} must be a string, null or a list of text parts", param=place)


def _read_part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, Mapping) or key is None:
        raise InvalidRequestError(
            f"{place}.type is {kind!r:.40}; this model takes text parts only", param=f"{place}.type"
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.{key} must be a string", param=f"{place}.{key}")
    return text


def _normalize_tool_calls(calls: object, place: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{place} must be a list", param=place)
    return [_normalize_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _normalize_tool_call(call: object, place: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(f"{place}.function must be an object", param=f"{place}.function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{place}.function.name must be a string", param=f"{place}.function.name")
    return {**call, "function": {**function, "arguments": _parse_arguments(function.get("arguments"))}}


def _parse_arguments(arguments: object) -> object:
    """Parse what the model once wrote; what is no JSON goes back to it as it was."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
