"""From the bytes of a request's body to a typed object, or to an error that names the first bad field.

Not here: which fields there are (`sampling_fields`, `openai_schema`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.text_validation import require_encodable

_SHOWN_CHARACTERS = 40
_EXACT = 2.0**53
"""Up to here a float64 that is whole is exactly that integer."""
Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Read a request body; raises InvalidRequestError that names the first bad field."""
    value = _parse_object(raw)
    for name, field in value.items():
        require_encodable(name, "a key of the body")
        require_encodable(field, name)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _describe(error) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _parse_object(raw: bytes) -> dict[str, object]:
    """The standard library's parser: unlike pydantic's it lets lone surrogates through, so that the field is named."""
    if not raw.strip():
        raise InvalidRequestError("the body is empty; a JSON object is needed")
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, parse_float=_read_number)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _read_number(text: str) -> float:
    """JSON has one kind of number: 5.0 is the integer 5, and clients whose language has no integers send it."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _describe(error: ValidationError) -> InvalidRequestError:
    problems = error.errors(include_url=False, include_context=False)
    first: Mapping[str, Any] = problems[0]
    place = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    others = {str(problem["loc"][0]) for problem in problems[1:] if problem["loc"]} - {param}
    more = f" (also wrong: {', '.join(sorted(others))})" if others else ""
    return InvalidRequestError(f"{place}{_show(first)}: {first['msg']}{more}", param=param)


def _show(problem: Mapping[str, Any]) -> str:
    """The refused value where it is short enough to be looked at."""
    value = problem["input"]
    if problem["type"] == "missing" or not isinstance(value, str | int | float | None):
        return ""
    return f" is {json.dumps(value, ensure_ascii=False)[:_SHOWN_CHARACTERS]}"
