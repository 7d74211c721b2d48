"""The text of one output as a client sees it: detokenized, cut at the first stop string.

Joins `incremental_detokenizer` and `stop_strings`; the caller leaves out the token that ended the sequence.

Text is held back (half a character, the beginning of a stop string), so a token and its text may go out at different
times. Who reports something about each token (log-probabilities) sets tracks_tokens and is told which are settled:

    tokens  "A" | "B" | C3 | A9 | "EN" | "D"     stop "END"
    text    "A"   "B"    ·   "é"   ·     ·       (· nothing yet)
    settled  1     1     0    2    0     0       the tokens of the stop string are dropped with its text

A token is settled with the text that holds its last character; one that lies in what a stop string cut off never is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.incremental_detokenizer import IncrementalDetokenizer
from kvpilot_engine.text.stop_strings import StopResult, StopStringMatcher
from kvpilot_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Text that may go out now, and the stop string that ended the output (then nothing follows)."""

    text: str
    matched: str | None = None
    offsets: tuple[int, ...] = ()
    """With tracks_tokens: for each token that is settled now, in order, the character of the output where it begins."""


class OutputText:
    """One per choice. `push` for each step's ids, then `finish` once, unless a stop string matched before."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Iterable[str] = (),
        *,
        skip_specials: bool = True,
        keeps_stop: bool = False,
        num_unstoppable: int = 0,
        tracks_tokens: bool = False,
    ) -> None:
        """The text of the first `num_unstoppable` tokens never takes part in a stop string."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_specials=skip_specials)
        self._matcher = StopStringMatcher(stop_strings, keeps_match=keeps_stop)
        self._num_unstoppable = num_unstoppable
        self._spans: deque[tuple[int, int]] | None = deque() if tracks_tokens else None
        self._num_decoded = 0
        self._num_released = 0

    def push(self, ids: Sequence[TokenId]) -> OutputPiece:
        """Return the text that may be sent now, perhaps none (then send nothing)."""
        if self._spans is None and not self._num_unstoppable:
            result = self._matcher.push(self._detokenizer.push(ids))
            return OutputPiece(result.text, result.matched)
        text = ""
        result = StopResult("")
        for token_id in ids:
            result = self._push_one(token_id)
            text += result.text
            if result.matched is not None:
                break
        return self._release(text, result.matched)

    def finish(self) -> OutputPiece:
        """Return the rest; even its last character may complete a stop string."""
        result = self._matcher.push(self._detokenizer.flush())
        if result.matched is not None:
            return self._release(result.text, result.matched)
        piece = self._release(result.text + self._matcher.flush(), None)
        rest = tuple(start for start, _ in self._spans or ())
        return OutputPiece(piece.text, None, piece.offsets + rest)

    def _push_one(self, token_id: TokenId) -> StopResult:
        start = self._num_decoded
        text = self._detokenizer.push((token_id,))
        self._num_decoded += len(text)
        if self._spans is not None:
            self._spans.append((start, self._num_decoded + self._detokenizer.is_inside_character))
        if not self._num_unstoppable:
            return self._matcher.push(text)
        self._num_unstoppable -= 1
        return StopResult(text)

    def _release(self, text: str, matched: str | None) -> OutputPiece:
        if self._spans is None:
            return OutputPiece(text, matched)
        self._num_released += len(text)
        settled: list[int] = []
        while self._spans and self._is_settled(*self._spans[0], is_end=matched is not None):
            settled.append(self._spans.popleft()[0])
        return OutputPiece(text, matched, tuple(settled))

    def _is_settled(self, start: int, end: int, *, is_end: bool) -> bool:
        return end <= self._num_released or (is_end and start < self._num_released)
