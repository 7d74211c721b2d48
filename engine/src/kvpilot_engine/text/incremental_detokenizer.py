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

_NOTHING: frozenset[TokenId] = frozenset()


class IncrementalDetokenizer:
    """The text of one output; with skip_specials, control tokens add nothing to it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_specials else _NOTHING
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[TokenId]) -> str:
        """Return the text that these ids complete; empty while a character is incomplete."""
        hidden = self._hidden
        return self._decoder.decode(b"".join(self._token_bytes(i) for i in ids if i not in hidden))

    @property
    def is_inside_character(self) -> bool:
        """True while bytes of an incomplete character are held."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return what is held at the end of the output: U+FFFD for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)
