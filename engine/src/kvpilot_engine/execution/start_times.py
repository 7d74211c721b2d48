"""What a start is made of: seconds by part, told once when it is over. Parts may overlap, and add up to more then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartTimes:
    """Used by one thread, and for one part each by others."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside; a part that comes again is added."""
        started = self._now()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + self._now() - started

    def describe(self) -> str:
        """`loaded in 2.1 s: imports 0.4, weights 0.5, ...`"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts.items())
        return f"loaded in {self._now() - self._started:.1f} s: {parts}"
