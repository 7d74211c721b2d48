"""The children of each object as they were listed last, until a watch tells of a change, we write one, or time passes.

A tick looks at load and pods; its five lists of children that nobody touched would be most of the API server's work.
Only ever a shortcut: a pass with an old list plans a write that the next pass finds done. Pods are never kept here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.observation import ChildObservation
from kvpilot_operator.core.ports import Clock

MAX_AGE_S = 60.0
"""A watch may be silent without our knowing; what it did not tell is seen after this at the latest."""

_Children = tuple[ChildObservation, ...]


class ChildCache:
    """One entry for each object; a change that is told while a list is under way counts against that list."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes: defaultdict[NamespacedName, int] = defaultdict(int)
        self._entries: dict[NamespacedName, tuple[str, int, float, _Children]] = {}

    def invalidate(self, key: NamespacedName) -> None:
        self._changes[key] += 1

    def forget(self, key: NamespacedName) -> None:
        self._changes.pop(key, None)
        self._entries.pop(key, None)

    async def get(self, owner: Owner, list_children: Callable[[Owner], Awaitable[_Children]]) -> _Children:
        """The kept list while it is known to hold, else a new one."""
        changes, now = self._changes[owner.key], self._clock.monotonic()
        entry = self._entries.get(owner.key)
        if entry is not None and entry[:2] == (owner.uid, changes) and now - entry[2] < MAX_AGE_S:
            return entry[3]
        children = await list_children(owner)
        if all(child.controlled for child in children):
            # What is not ours need not carry our label, and then no watch tells when it goes.
            self._entries[owner.key] = (owner.uid, changes, now, children)
        return children
