"""Lines on a terminal that say what is going on, how far it is and how long it has taken.

Not a logger: output of programs goes to log files. Invariant: every line is complete, so that it can be read in a CI
log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

HEARTBEAT_S = 10.0


@dataclass(slots=True)
class Progress:
    """Prints lines with the time since it was made; `write` is where they go (standard error by default)."""

    write: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _started: float = field(default_factory=time.monotonic)
    _last_beat: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this progress began."""
        return time.monotonic() - self._started

    def line(self, text: str) -> None:
        """Print one line."""
        self._last_beat = time.monotonic()
        self.write(f"[{self.elapsed_s:5.1f} s] {text}")

    def beat(self, text: str) -> None:
        """Print the line if nothing was printed for a while; for loops that wait."""
        if time.monotonic() - self._last_beat >= HEARTBEAT_S:
            self.line(text)


def silent() -> Progress:
    """Build a progress that prints nothing, for use as a library."""
    return Progress(write=_discard)


def _discard(line: str) -> None:
    del line
