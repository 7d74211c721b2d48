"""The only object key."""

from __future__ import annotations

from typing import NamedTuple


class NamespacedName(NamedTuple):
    """Used for locks, queues, metrics and logs."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
