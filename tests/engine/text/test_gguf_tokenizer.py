"""GGUF vocabularies against llama.cpp, by fixtures of `kvpilot_tools.tokenizer_oracle`."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import SettingsError
from kvpilot_engine.text.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"


def _read_fixture(name: str) -> dict[str, Any]:
    fixture: dict[str, Any] = json.loads(gzip.decompress((FIXTURES / name).read_bytes()))
    return fixture


@pytest.fixture(scope="session")
def pre_types() -> dict[str, Any]:
    return _read_fixture("pre-tokenizers.json.gz")


@pytest.fixture(scope="session")
def smollm2() -> dict[str, Any]:
    return _read_fixture("smollm2-tokenizer.json.gz")


@pytest.fixture(scope="session")
def sentencepiece() -> dict[str, Any]:
    return _read_fixture("sentencepiece.json.gz")


def _make_metadata(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<s>", "</s>", "a", "b", "ab", "Ġ", "<|im_end|>"],
        "token_type": [3, 3, 1, 1, 1, 1, 3],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    values.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_every_known_pre_tokenizer_is_in_the_fixture(pre_types: dict[str, Any]) -> None:
    assert sorted(pre_types["ids"]) == sorted(PRE_TOKENIZERS)
    assert len(pre_types["strings"]) >= 1500


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_pre_tokenizers_cut_where_llama_cpp_cuts(pre: str, pre_types: dict[str, Any]) -> None:
    tokens = pre_types["tokens"]
    tokenizer = build_gguf_tokenizer(
        _make_metadata(pre=pre, tokens=tokens, merges=pre_types["merges"], token_type=[1] * len(tokens)), Path("x.gguf")
    )
    differing = [
        text
        for text, ids in zip(pre_types["strings"], pre_types["ids"][pre], strict=True)
        if tokenizer.encode(text, specials_as_text=True) != ids
    ]
    assert differing == []


@pytest.mark.parametrize("space", ["space", "no space"])
def test_a_sentencepiece_vocabulary_tokenizes_like_llama_cpp(space: str, sentencepiece: dict[str, Any]) -> None:
    tokenizer = _build_sentencepiece(sentencepiece, add_space_prefix=space == "space")
    cases = list(zip(sentencepiece["strings"], sentencepiece["ids"][space], strict=True))
    assert len(cases) >= 1500
    assert [text for text, (_, parsed) in cases if tokenizer.encode(text, specials_as_text=False) != parsed] == []
    as_text = [(text, tokenizer.encode(text, specials_as_text=True), plain) for text, (plain, _) in cases]
    # llama.cpp joins the letters of a control token to that token even when it was told that they are text
    harmless = [case for case in as_text if "<s>" not in case[0] and "</s>" not in case[0]]
    assert [text for text, ids, plain in harmless if ids != plain] == []
    assert len(harmless) < len(as_text)
    assert not any(tokenizer.special_ids & set(ids) for _, ids, _ in as_text)


def test_a_sentencepiece_text_comes_back_without_the_space_that_was_put_before_it(
    sentencepiece: dict[str, Any],
) -> None:
    tokenizer = _build_sentencepiece(sentencepiece, add_space_prefix=True)
    for text in ("two words", "ein Wörterbuch: 字典 🙂", "[user] in the middle [user]"):
        assert tokenizer.decode(tokenizer.encode(text, specials_as_text=True)).replace("  ", " ").strip() == text


def _build_sentencepiece(fixture: dict[str, Any], **changes: object) -> Tokenizer:
    vocabulary = {key: fixture[key] for key in ("tokens", "token_type", "scores")}
    return build_gguf_tokenizer(_make_metadata(model="llama", **vocabulary, **changes), Path("x.gguf"))


@pytest.mark.model
def test_the_real_model_tokenizes_like_llama_cpp(smollm2: dict[str, Any], smollm2_text: ModelText) -> None:
    tokenizer = smollm2_text.tokenizer
    cases = [(text, plain, rest[0] if rest else plain) for text, plain, *rest in smollm2["cases"]]
    assert len(cases) >= 1500
    assert [text for text, plain, _ in cases if tokenizer.encode(text, specials_as_text=True) != plain] == []
    assert [text for text, _, parsed in cases if tokenizer.encode(text, specials_as_text=False) != parsed] == []


@pytest.mark.model
def test_the_real_model_has_the_tokens_of_llama_cpp(smollm2: dict[str, Any], smollm2_text: ModelText) -> None:
    tokenizer = smollm2_text.tokenizer
    pieces = [tokenizer.token_bytes(TokenId(i)) for i in range(tokenizer.vocab_size)]
    assert tokenizer.vocab_size == smollm2["vocab_size"]
    assert hashlib.sha256(b"\0".join(pieces)).hexdigest() == smollm2["token_bytes_sha256"]
    assert sorted(tokenizer.special_ids) == smollm2["control_ids"]
    # llama.cpp ends at fill-in-the-middle tokens too, which no chat model writes.
    assert smollm2_text.end_token_ids == {0, 2} <= set(smollm2["end_ids"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "brand-new-bpe"}, "'brand-new-bpe'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"model": "t5"}, "'t5'"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries, tokens 7"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": [1]}, "tokenizer.ggml.merges"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"merges": ["a z"]}, "merges"),
    ],
)
def test_what_cannot_be_built_is_an_error_that_names_it(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=r"broken\.gguf") as error:
        build_gguf_tokenizer(_make_metadata(**changes), Path("broken.gguf"))
    assert named in str(error.value)


def test_the_policy_comes_from_the_metadata() -> None:
    policy = build_gguf_tokenizer(_make_metadata(add_bos_token=True), Path("x.gguf")).policy
    assert (policy.bos_id, policy.eos_id, policy.adds_bos) == (0, 1, True)
    assert policy.end_ids == {1, 6}  # `</s>` as stated, `<|im_end|>` because it is known to end turns
    assert policy.named_specials == {"bos_token": "<s>", "eos_token": "</s>"}


def test_only_the_kinds_that_llama_cpp_treats_so_add_a_bos_unasked() -> None:
    assert not build_gguf_tokenizer(_make_metadata(), Path("x.gguf")).policy.adds_bos
    assert build_gguf_tokenizer(_make_metadata(pre="llama-bpe"), Path("x.gguf")).policy.adds_bos
    stated = _make_metadata(pre="llama-bpe", add_bos_token=False)
    assert not build_gguf_tokenizer(stated, Path("x.gguf")).policy.adds_bos


def test_a_whole_token_counts_before_its_merges_only_where_llama_cpp_says_so() -> None:
    changes = {"tokens": ["a", "b", "c", "ab", "bc", "abc"], "token_type": [1] * 6, "merges": ["a b", "b c"]}
    by_merges = build_gguf_tokenizer(_make_metadata(**changes), Path("x.gguf"))
    whole_first = build_gguf_tokenizer(_make_metadata(pre="llama-bpe", **changes), Path("x.gguf"))
    assert by_merges.encode("abc", specials_as_text=True) == [3, 2]
    assert whole_first.encode("abc", specials_as_text=True) == [5]


def test_a_special_id_outside_the_vocabulary_is_none() -> None:
    policy = build_gguf_tokenizer(_make_metadata(bos_token_id=99, add_bos_token=True), Path("x.gguf")).policy
    assert policy.bos_id is None
    assert not policy.adds_bos
