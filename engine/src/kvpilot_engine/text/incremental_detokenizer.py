"""Token ids to text while they arrive.

    tokens   … "Tře" | "b" + C3 | AD ...
    pushed         "Třeb"  held: C3 → "í"      at most three bytes are ever held back

Invariant: the deltas joined are the decoded text of all ids, and U+FFFD is in it only where the bytes are no UTF-8.
Not here: stop strings (`stop_strings`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one output; control tokens add nothing to it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[TokenId]) -> str:
        """Return the text that these ids complete; empty while a character is incomplete."""
        hidden = self._tokenizer.special_ids
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in hidden))

    def flush(self) -> str:
        """Return what is held at the end of the output: U+FFFD for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)
