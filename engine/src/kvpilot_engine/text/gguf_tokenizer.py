"""Builds a tokenizer from GGUF metadata.

GGUF names a pre-tokenizer by one word (`tokenizer.ggml.pre`), whose meaning is only in llama.cpp's source. Guessing it
changes tokens silently, so each word has one entry here, compared with llama.cpp on a stress list, and an unknown one
is an error. Not here: `tokenizer.ggml.model` other than `gpt2` (byte-level BPE).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import SettingsError
from kvpilot_engine.text.byte_level import byte_level_bytes
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

T = TypeVar("T")
_CONTROL, _USER_DEFINED = 3, 4


def _build_smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = {
    "smollm": _build_smollm,
}

_NAMED_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Names in chat templates → names in GGUF (the misspelling is the format's)."""

_KNOWN_END_TEXTS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
    "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "</s>",
)  # fmt: skip
"""Control tokens that end a turn though the file's single eos id may be another one (llama.cpp has such a list too)."""


def build_gguf_tokenizer(metadata: Mapping[str, object], path: Path) -> Tokenizer:
    """Build the tokenizer; `path` only names the file in errors."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise SettingsError(
            [f"model {path}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) can be built from GGUF"]
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise SettingsError(
            [f"model {path}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"]
        )
    tokens = _get_list(metadata, "tokenizer.ggml.tokens", str, path)
    types = _get_list(metadata, "tokenizer.ggml.token_type", int, path)
    merges = [_split_merge(merge) for merge in _get_list(metadata, "tokenizer.ggml.merges", str, path)]

    backend = tokenizers.Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return Tokenizer(backend, to_bytes=byte_level_bytes, policy=_read_policy(metadata, tokens, types))


def _read_policy(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> TokenizerPolicy:
    def get_id(name: str) -> TokenId | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return TokenId(value) if isinstance(value, int) and 0 <= value < len(tokens) else None

    by_name = {f"{name}_token": get_id(key) for name, key in _NAMED_IDS.items()}
    known_ends = {
        TokenId(i)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _KNOWN_END_TEXTS
    }
    stated_ends = {i for i in map(get_id, ("eos", "eot", "eom")) if i is not None}
    bos_id = get_id("bos")
    return TokenizerPolicy(
        bos_id=bos_id,
        eos_id=get_id("eos"),
        adds_bos=bos_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        end_ids=frozenset(known_ends | stated_ends),
        named_specials={name: tokens[i] for name, i in by_name.items() if i is not None},
    )


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _get_list(metadata: Mapping[str, object], key: str, kind: type[T], path: Path) -> list[T]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise SettingsError([f"model {path}: {key} is missing or holds something else than {kind.__name__}"])
    return value
