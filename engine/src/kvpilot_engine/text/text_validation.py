"""Refuses text that is no text: a lone surrogate passes a JSON parser and breaks the tokenizer later."""

from __future__ import annotations

from kvpilot_engine.errors import InvalidRequestError


def require_encodable(value: object, param: str) -> None:
    """Raise InvalidRequestError naming the place if a string in `value` (JSON data) has a lone surrogate."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param} holds the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}; "
                "it can't be encoded",
                param=param,
            ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            require_encodable(key, f"{param} (a key)")
            require_encodable(item, f"{param}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_encodable(item, f"{param}[{index}]")
