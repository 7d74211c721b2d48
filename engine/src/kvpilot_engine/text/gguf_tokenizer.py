"""Builds a tokenizer from GGUF metadata.

GGUF names a pre-tokenizer by one word (`tokenizer.ggml.pre`), whose meaning is only in llama.cpp's source. Guessing it
changes tokens silently, so each word has one entry here, compared with llama.cpp on a stress list, and an unknown one
is an error. SentencePiece vocabularies need no such word. Not here: the other values of `tokenizer.ggml.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import Regex, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import SettingsError
from kvpilot_engine.text.byte_level import byte_level_bytes, sentencepiece_bytes
from kvpilot_engine.text.gguf_sentencepiece import build_sentencepiece_backend
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

T = TypeVar("T")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizerKind:
    """How text is cut before merging, and what else goes with the name."""

    build: Callable[[], PreTokenizer]
    ignores_merges: bool = False
    """A piece that is a token as a whole is that token, even where its merges lead elsewhere."""
    adds_bos: bool = False
    """When the file has no `tokenizer.ggml.add_bos_token`."""


def _cut_by(*patterns: str) -> Callable[[], PreTokenizer]:
    """Cut by each pattern in turn, matches and what lies between both being pieces."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, PreTokenizerKind] = {
    "gpt-2": PreTokenizerKind(build=_cut_by(_GPT2)),
    "llama-bpe": PreTokenizerKind(build=_cut_by(_LLAMA3_QWEN2 % "{1,3}"), ignores_merges=True, adds_bos=True),
    "qwen2": PreTokenizerKind(build=_cut_by(_LLAMA3_QWEN2 % "")),
    "smollm": PreTokenizerKind(build=_cut_by(r"\p{N}", _GPT2)),
}
"""Each compared with llama.cpp (`kvpilot_tools.tokenizer_oracle`)."""

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
    tokens = _get_list(metadata, "tokenizer.ggml.tokens", str, path)
    types = _get_list(metadata, "tokenizer.ggml.token_type", int, path)
    if len(types) != len(tokens):
        raise SettingsError([f"model {path}: tokenizer.ggml.token_type has {len(types)} entries, tokens {len(tokens)}"])
    if model == "gpt2":
        return _build_byte_level(metadata, tokens, types, path)
    if model == "llama":
        return _build_sentencepiece(metadata, tokens, types, path)
    raise SettingsError(
        [
            f"model {path}: tokenizer.ggml.model is {model!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) "
            "can be built from GGUF"
        ]
    )


def _build_byte_level(metadata: Mapping[str, object], tokens: list[str], types: list[int], path: Path) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise SettingsError(
            [f"model {path}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"]
        )
    merges = [_split_merge(merge) for merge in _get_list(metadata, "tokenizer.ggml.merges", str, path)]
    kind = PRE_TOKENIZERS[pre]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=kind.ignores_merges))
    except Exception as error:  # the library raises nothing narrower
        raise SettingsError([f"model {path}: tokenizer.ggml.merges do not fit the tokens: {error}"]) from error
    backend.pre_tokenizer = kind.build()
    _add_specials(backend, tokens, types)
    policy = _read_policy(metadata, tokens, types, adds_bos=kind.adds_bos)
    return Tokenizer(backend, to_bytes=byte_level_bytes, policy=policy)


def _build_sentencepiece(metadata: Mapping[str, object], tokens: list[str], types: list[int], path: Path) -> Tokenizer:
    scores = _get_list(metadata, "tokenizer.ggml.scores", float, path)
    if len(scores) != len(tokens):
        raise SettingsError([f"model {path}: tokenizer.ggml.scores has {len(scores)} entries, tokens {len(tokens)}"])
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = build_sentencepiece_backend(
        tokens,
        scores,
        joinable=[kind not in (_UNKNOWN, _CONTROL, _BYTE) for kind in types],
        unknown=unknown,
        adds_space=adds_space,
    )
    _add_specials(backend, tokens, types)
    policy = _read_policy(metadata, tokens, types, adds_bos=True)
    policy = replace(policy, drops_leading_space=adds_space)
    return Tokenizer(backend, to_bytes=sentencepiece_bytes, policy=policy)


def _add_specials(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _read_policy(
    metadata: Mapping[str, object], tokens: list[str], types: list[int], *, adds_bos: bool
) -> TokenizerPolicy:
    def get_id(name: str) -> TokenId | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return TokenId(value) if isinstance(value, int) and 0 <= value < len(tokens) else None

    by_name = {f"{name}_token": get_id(key) for name, key in _NAMED_IDS.items()}
    known_ends = {
        TokenId(i)
        for i, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type == _CONTROL and token in _KNOWN_END_TEXTS
    }
    stated_ends = {i for i in map(get_id, ("eos", "eot", "eom")) if i is not None}
    bos_id = get_id("bos")
    return TokenizerPolicy(
        bos_id=bos_id,
        eos_id=get_id("eos"),
        adds_bos=bos_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
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
