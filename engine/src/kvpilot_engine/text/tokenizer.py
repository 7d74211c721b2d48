"""Text to token ids and back, with one meaning whatever the model's files are.

Wraps a `tokenizers` object that never sees control tokens: this module itself splits a text at them, so that it can be
told which text may hold real ones (a template's own markers) and which may not (what a user wrote).
Not here: reading model files (`gguf_tokenizer`, `hf_tokenizer`), decoding piece by piece (`incremental_detokenizer`).
Invariant: with specials_as_text no id of `special_ids` is ever returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import tokenizers

from kvpilot_engine.core.ids import TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerPolicy:
    """What a model's files say beside its vocabulary."""

    bos_id: TokenId | None = None
    eos_id: TokenId | None = None
    adds_bos: bool = False
    """A prompt starts with bos_id whether or not its text says so."""
    end_ids: frozenset[TokenId] = frozenset()
    """Tokens that end a generation."""
    named_specials: Mapping[str, str] = field(default_factory=dict)
    """Texts that chat templates ask for by name: bos_token, eos_token, pad_token, …"""
    drops_leading_space: bool = False
    """The first space of a whole decoded text was put there by the tokenizer (SentencePiece)."""


@dataclass(frozen=True, slots=True)
class _Special:
    token_id: TokenId
    strips_left: bool
    """Takes the white space before it with it."""
    strips_right: bool


class Tokenizer:
    """Safe to use from several threads: nothing changes after construction."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        to_bytes: Callable[[str], bytes],
        policy: TokenizerPolicy,
        continuation: tokenizers.Tokenizer | None = None,
    ) -> None:
        """Take over `backend`; `to_bytes` maps a token of its vocabulary, as written there, to what it stands for.

        `continuation` encodes what does not begin a text, where that differs (SentencePiece adds a space in front).
        """
        self._first = backend
        self._continuation = continuation or backend
        for each in (self._first, self._continuation):
            each.no_truncation()
            each.no_padding()
            each.encode_special_tokens = True
        self.policy = policy
        added = {TokenId(i): token for i, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._specials_by_text = {
            added[i].content: _Special(i, strips_left=added[i].lstrip, strips_right=added[i].rstrip)
            for i in self.special_ids
        }
        self._special_pattern = _compile_special_pattern(self._specials_by_text)
        ids_by_text = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids_by_text.values()) + 1
        self._bytes = [b""] * self.vocab_size
        for text, i in ids_by_text.items():
            self._bytes[i] = text.encode("utf-8") if i in added else to_bytes(text)

    @property
    def special_texts(self) -> Iterable[str]:
        return self._specials_by_text.keys()

    def special_id(self, text: str) -> TokenId | None:
        """The control token written as `text`, if there is one."""
        special = self._specials_by_text.get(text)
        return None if special is None else special.token_id

    def encode(self, text: str, *, specials_as_text: bool) -> list[TokenId]:
        """Encode `text` without adding a BOS; specials_as_text for anything a user wrote."""
        if specials_as_text:
            return self.encode_parts([text])
        return self.encode_parts(self.split_at_specials(text))

    def encode_parts(self, parts: Iterable[str | TokenId]) -> list[TokenId]:
        """Encode the parts of one text: a string as plain text, a control token as itself."""
        ids: list[TokenId] = []
        backend = self._first
        for part in parts:
            if isinstance(part, str):
                ids += [TokenId(i) for i in backend.encode(part, add_special_tokens=False).ids]
            else:
                ids.append(part)
            backend = self._continuation
        return ids

    def split_at_specials(self, text: str) -> list[str | TokenId]:
        """Cut `text` into plain parts (never empty) and the control tokens between them."""
        if self._special_pattern is None:
            return [text] if text else []
        parts: list[str | TokenId] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            special = self._specials_by_text[match.group()]
            before = text[end : match.start()]
            if special.strips_left:
                before = before.rstrip()
            if before:
                parts.append(before)
            parts.append(special.token_id)
            end = match.end()
            while special.strips_right and text[end : end + 1].isspace():
                end += 1
        if end < len(text):
            parts.append(text[end:])
        return parts

    def with_bos(self, ids: list[TokenId]) -> list[TokenId]:
        """Return `ids` with exactly one BOS in front where the model wants one; unchanged where it does not."""
        bos = self.policy.bos_id
        if not self.policy.adds_bos or bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos, *ids[start:]]

    def token_bytes(self, token_id: TokenId) -> bytes:
        """What one token adds to the text, perhaps a part of a character; nothing for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[TokenId], *, skip_specials: bool = False) -> str:
        """Decode a whole text; bytes that are no UTF-8 become U+FFFD."""
        hidden = self.special_ids if skip_specials else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.policy.drops_leading_space else text


def _compile_special_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Longest first, as `tokenizers` matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
