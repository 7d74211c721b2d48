"""Finds stop strings in text that arrives in pieces, and lets nothing of them out.

    stop "DEFG", text "ABC" "DE" "X":   out "ABC", held "DE" → out "DEX"

Held back is only the longest end of the text that can still become a stop string. The stop string that is complete
first wins, of two that end at the same character the longer one: so the result does not depend on how the text was cut.
Not here: stop tokens (the engine core) and what a finish reason is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpilot_engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may go out now, and the stop string that ended the output (then nothing follows)."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Watches one output for its stop strings; with keeps_match the one that is found goes out too."""

    def __init__(self, stop_strings: Iterable[str], *, keeps_match: bool = False) -> None:
        self._stop_strings = tuple(dict.fromkeys(stop_strings))
        if not all(self._stop_strings):
            raise InvalidRequestError("stop holds an empty string; it would end every output", param="stop")
        self._longest = max(map(len, self._stop_strings), default=0)
        self._keeps_match = keeps_match
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take more of the output; not to be called again after a match."""
        if not self._stop_strings:
            return StopResult(text)
        pending = self._held + text
        matches = [
            (start + len(stop), start, stop) for stop in self._stop_strings if (start := pending.find(stop)) >= 0
        ]
        if matches:
            end, start, matched = min(matches)
            self._held = ""
            return StopResult(pending[: end if self._keeps_match else start], matched)
        num_held = self._count_held(pending)
        self._held = pending[len(pending) - num_held :]
        return StopResult(pending[: len(pending) - num_held])

    def flush(self) -> str:
        """Return what is held, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _count_held(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest_possible = min(self._longest - 1, len(pending))
        for length in range(longest_possible, 0, -1):
            end = pending[-length:]
            if any(stop.startswith(end) for stop in self._stop_strings):
                return length
        return 0
