"""Builds a tokenizer from a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`.

Not here: folders with only a SentencePiece `tokenizer.model` (an error says so).
Invariant: a token that looks like a control token is one, even where `tokenizer.json` forgot to say so; otherwise a
user could write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.text.byte_level import byte_level_bytes, sentencepiece_bytes
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

_LOOKS_LIKE_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|<(?:s|/s|pad|bos|eos|mask|start_of_turn|end_of_turn)>", re.DOTALL)
"""llama.cpp's converter has the same rule: DeepSeek's `<｜User｜>`, for one, is not marked special."""


def read_json_object(path: Path) -> dict[str, object]:
    """Read one of the folder's JSON files; an absent one is empty."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError([f"model {path}: not valid JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise SettingsError([f"model {path}: a JSON object is expected, not {type(value).__name__}"])
    return value


def build_hf_tokenizer(
    folder: Path, *, config: Mapping[str, object], generation_config: Mapping[str, object]
) -> Tokenizer:
    """Build the tokenizer of `folder`, whose two config files are already read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is missing; a folder needs tokenizer.json (only `tokenizers` files are read)")
    document = read_json_object(path)
    _mark_control_tokens(document)
    backend = _build_backend(document, path)
    continuation = _build_backend(document, path) if _forbid_later_spaces(document) else None
    to_bytes, drops_leading_space = _choose_byte_mapping(document, path)
    specials = _read_named_specials(config)
    return Tokenizer(
        backend,
        to_bytes=to_bytes,
        continuation=continuation,
        policy=_build_policy(backend, config, generation_config, specials, drops_leading_space),
    )


def _build_backend(document: Mapping[str, object], path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises nothing narrower
        raise SettingsError([f"model {path}: not a tokenizer that `tokenizers` can read: {error}"]) from error


def _forbid_later_spaces(document: Mapping[str, object]) -> bool:
    """Change `prepend_scheme: first` to what it means for all but the first part of a text; tell whether it was so."""
    pre_tokenizer = document.get("pre_tokenizer")
    found = False
    for part in _list_steps(pre_tokenizer, "pretokenizers") if isinstance(pre_tokenizer, dict) else ():
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            found = True
    return found


def _list_steps(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, or the only one."""
    return step.get(key, []) if step.get("type") == "Sequence" else [step]


def _mark_control_tokens(document: dict[str, object]) -> None:
    added = document.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if _LOOKS_LIKE_CONTROL.fullmatch(token["content"]):
            token["special"] = True


def _choose_byte_mapping(document: Mapping[str, object], path: Path) -> tuple[Callable[[str], bytes], bool]:
    """Return what maps tokens to bytes, and whether decoding drops a leading space."""
    decoder = document.get("decoder")
    steps = _list_steps(decoder, "decoders") if isinstance(decoder, dict) else []
    kinds = {str(step.get("type")): step for step in steps}
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = kinds.get("Strip", {}).get("start", 0) == 1
        prepends = kinds.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return sentencepiece_bytes, strips or prepends
    raise SettingsError(
        [f"model {path}: decoder {', '.join(kinds) or 'missing'}; known are ByteLevel, ByteFallback and Metaspace"]
    )


def _read_named_specials(config: Mapping[str, object]) -> dict[str, str]:
    """Return bos_token, eos_token and the like: each a string, or an object that holds it as `content`."""
    named: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named


def _build_policy(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, object],
    generation_config: Mapping[str, object],
    specials: Mapping[str, str],
    drops_leading_space: bool,
) -> TokenizerPolicy:
    def get_id(name: str) -> TokenId | None:
        token_id = backend.token_to_id(specials[name]) if name in specials else None
        return None if token_id is None else TokenId(token_id)

    bos_id, eos_id = get_id("bos_token"), get_id("eos_token")
    stated = generation_config.get("eos_token_id")
    end_ids = {TokenId(i) for i in (stated if isinstance(stated, list) else [stated]) if isinstance(i, int)}
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):  # then only the post-processor knows
        add_bos = backend.encode("a").ids[:1] == [bos_id]
    return TokenizerPolicy(
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=add_bos and bos_id is not None,
        end_ids=frozenset(end_ids | ({eos_id} if eos_id is not None else set())),
        named_specials=specials,
        drops_leading_space=drops_leading_space,
    )
