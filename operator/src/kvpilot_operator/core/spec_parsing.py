"""JSON into frozen dataclasses, with every problem collected by its path. Knows nothing of the fields' meaning.

A field's JSON name, type, bounds and default all come from the dataclass, so that no message can name the wrong field.
Unknown fields are ignored: the API server has pruned what the installed schema doesn't know.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive bounds of a number, put on a field's type by Annotated."""

    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True)
class OneOf:
    """The values that a number may have, put on a field's type by Annotated."""

    values: tuple[int, ...]


class _Problem(Exception):  # noqa: N818 - not an error of ours: it never leaves this module
    """What is wrong with one value."""


def json_name(name: str) -> str:
    """`min_replicas` → `minReplicas`, `kv_cache_dtype` → `kvCacheDtype`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def parse_dataclass(cls: type[T], value: object, path: str, problems: list[str]) -> T | None:
    """`value` as a `cls`; None and at least one line in `problems` when it can't be one."""
    if not isinstance(value, Mapping):
        problems.append(f"{path} must be an object")
        return None
    hints = _type_hints(cls)  # type: ignore[arg-type] # every class is hashable
    known: dict[str, Any] = {}
    num_problems = len(problems)
    for item in fields(cls):  # type: ignore[arg-type] # T is always a dataclass here
        name = json_name(item.name)
        where = f"{path}.{name}"
        raw = value.get(name)
        if raw is None:  # absent and null are the same to the API server
            if item.default is MISSING and item.default_factory is MISSING:
                problems.append(f"{where} is required")
            continue
        try:
            known[item.name] = _parse(hints[item.name], raw, where, problems)
        except _Problem as problem:
            problems.append(f"{where} {problem}")
    return None if len(problems) > num_problems else cls(**known)


@cache
def _type_hints(cls: type[Any]) -> dict[str, Any]:
    """Evaluated once: they are strings, and this was two thirds of a reconcile's own time."""
    return get_type_hints(cls, include_extras=True)


def dump_dataclass(value: Any) -> dict[str, Any]:
    """The JSON object that `parse_dataclass` reads as `value`, without the fields that have their default.

    What is left out can't change a hash of it: a later version may add a field without a change for old objects.
    """
    dumped: dict[str, Any] = {}
    for item in fields(value):
        current = getattr(value, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if current != default:
            dumped[json_name(item.name)] = _dump(current)
    return dumped


def _dump(value: Any) -> Any:
    if is_dataclass(value):
        return dump_dataclass(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, StrEnum) else value


def _parse(kind: Any, value: object, path: str, problems: list[str]) -> Any:
    limit: object = None
    kind = _without_none(kind)
    if get_origin(kind) is Annotated:
        kind, limit, *_ = get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return parse_dataclass(kind, value, path, problems)
    parsed = _parse_plain(kind, value)
    if isinstance(limit, Bounds) and not limit.minimum <= parsed <= limit.maximum:
        raise _Problem(f"must be {limit.minimum:g}..{limit.maximum:g}, is {value!r}")
    if isinstance(limit, OneOf) and parsed not in limit.values:
        raise _Problem(f"must be one of {', '.join(map(str, limit.values))}, is {value!r}")
    return parsed


def _without_none(kind: Any) -> Any:
    """X of `X | None`; other unions stay."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    members = [member for member in get_args(kind) if member is not type(None)]
    return members[0] if len(members) == 1 else Union[tuple(members)]  # noqa: UP007 - built at run time


def _parse_plain(kind: Any, value: object) -> Any:
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(value))
        except ValueError as error:
            raise _Problem(f"must be one of {', '.join(kind)}, is {value!r}") from error
    if origin is tuple:
        if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
            raise _Problem("must be a list of strings")
        return tuple(value)
    if origin is Mapping:
        return _parse_mapping(get_args(kind)[1], value)
    return _parse_scalar(kind, value)


def _parse_mapping(element: Any, value: object) -> Any:
    if not isinstance(value, Mapping):
        raise _Problem("must be an object")
    if element is Any:
        return value
    for key, item in value.items():
        try:
            _parse_scalar(element, item)
        except _Problem as problem:
            raise _Problem(f"[{key}] {problem}") from problem
    return dict(value)


def _parse_scalar(kind: Any, value: object) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
    elif kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif isinstance(value, kind):
        return value
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    raise _Problem(f"must be {names.get(kind, 'an integer or a string')}, is {value!r}")
