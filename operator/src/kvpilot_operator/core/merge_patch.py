"""JSON merge patches (RFC 7386) from two values: what turns one object into the other. Pure, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest patch from `old` to `new`; empty when they are equal. A key that went becomes null."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
            inner = build_merge_patch(old[key], value)
            if inner:
                patch[key] = inner
        elif old[key] != value:
            patch[key] = value
    return patch
