"""The text of a prompt and where each of its tokens begins in it: for answers that echo the prompt.

Invariant: offsets never fall and lie within the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.incremental_detokenizer import IncrementalDetokenizer
from kvpilot_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptText:
    text: str
    offsets: tuple[int, ...]
    """One per token of the prompt, in characters of `text`."""


def describe_prompt(tokenizer: Tokenizer, ids: Sequence[TokenId], *, text: str | None = None) -> PromptText:
    """`text` is the prompt as it was sent, None for ids. Control tokens are text here, an added BOS is none."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_specials=False)
    bos = tokenizer.policy.bos_id
    has_added_bos = bool(
        text is not None
        and ids
        and ids[0] == bos
        and not text.encode("utf-8", "replace").startswith(tokenizer.token_bytes(ids[0]))
    )
    decoded = ""
    offsets: list[int] = []
    for index, token_id in enumerate(ids):
        offsets.append(len(decoded))
        if index or not has_added_bos:
            decoded += detokenizer.push((token_id,))
    decoded += detokenizer.flush()
    if tokenizer.policy.drops_leading_space and decoded.startswith(" "):
        decoded = decoded[1:]
        offsets = [max(0, offset - 1) for offset in offsets]
    shown = decoded if text is None else text
    return PromptText(shown, tuple(min(offset, len(shown)) for offset in offsets))
