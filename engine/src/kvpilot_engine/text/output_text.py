"""The text of one output as a client sees it: detokenized, cut at the first stop string.

Joins `incremental_detokenizer` and `stop_strings`; the caller leaves out the token that ended the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.incremental_detokenizer import IncrementalDetokenizer
from kvpilot_engine.text.stop_strings import StopResult, StopStringMatcher
from kvpilot_engine.text.tokenizer import Tokenizer


class OutputText:
    """One per choice. `push` for each step's ids, then `finish` once, unless a stop string matched before."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Iterable[str] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(stop_strings)

    def push(self, ids: Iterable[TokenId]) -> StopResult:
        """Return the text that may be sent now, perhaps none (then send nothing)."""
        return self._matcher.push(self._detokenizer.push(ids))

    def finish(self) -> StopResult:
        """Return the rest; even its last character may complete a stop string."""
        result = self._matcher.push(self._detokenizer.flush())
        if result.matched is not None:
            return result
        return StopResult(result.text + self._matcher.flush())
