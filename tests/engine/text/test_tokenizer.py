"""Splitting at control tokens, BOS, bytes and ids, over a vocabulary of bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.byte_level import BYTE_TO_CHARACTER, byte_level_bytes, sentencepiece_bytes
from kvpilot_engine.text.testing import CONTROL_TEXTS, make_tokenizer
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

BOS, IM_START, IM_END = TokenId(256), TokenId(257), TokenId(258)
PIECES = st.sampled_from([*CONTROL_TEXTS, "<|", "im_end|>", "<", "|>", "a", "é", "한", "😀", "\n", " "])
TEXTS = st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=20)


def test_control_text_is_a_token_only_where_that_is_asked_for() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.encode("a<|im_end|>b", specials_as_text=False) == [ord("a"), IM_END, ord("b")]
    assert tokenizer.encode("a<|im_end|>b", specials_as_text=True) == list(b"a<|im_end|>b")


@given(TEXTS)
def test_text_from_a_user_never_yields_a_control_token(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, specials_as_text=True)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


@given(TEXTS)
def test_splitting_agrees_with_the_tokenizers_library(text: str) -> None:
    library = tokenizers.Tokenizer(BPE({character: byte for byte, character in BYTE_TO_CHARACTER.items()}, []))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    library.add_special_tokens([tokenizers.AddedToken(control, normalized=False) for control in CONTROL_TEXTS])
    assert make_tokenizer().encode(text, specials_as_text=False) == library.encode(text).ids


@given(st.lists(st.sampled_from(["<|user|>", "<mask>", "a", " ", "\n", "<"]), max_size=10).map("".join))
def test_stripping_agrees_with_the_tokenizers_library(text: str) -> None:
    def build() -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(BPE({character: byte for byte, character in BYTE_TO_CHARACTER.items()}, []))
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        user = tokenizers.AddedToken("<|user|>", rstrip=True, normalized=False)
        mask = tokenizers.AddedToken("<mask>", lstrip=True, normalized=False)
        backend.add_special_tokens([user, mask])
        return backend

    tokenizer = Tokenizer(build(), to_bytes=byte_level_bytes, policy=TokenizerPolicy())
    assert tokenizer.encode(text, specials_as_text=False) == build().encode(text).ids


def test_the_longest_control_token_wins() -> None:
    tokenizer = make_tokenizer(control_texts=("<|a", "<|a|>"))
    assert tokenizer.encode("<|a|><|a", specials_as_text=False) == [257, 256]


def test_user_defined_tokens_are_matched_in_any_text() -> None:
    tokenizer = make_tokenizer(user_defined_texts=("<think>",))
    think = TokenId(259)
    assert tokenizer.encode("<think>", specials_as_text=True) == [think]
    assert tokenizer.encode("<think>", specials_as_text=False) == [think]
    assert think not in tokenizer.special_ids


def test_merged_tokens_are_used() -> None:
    tokenizer = make_tokenizer(merged=["한".encode()])
    assert tokenizer.encode("한한", specials_as_text=True) == [257, 257]  # 256 is the half of it
    assert tokenizer.token_bytes(TokenId(257)) == "한".encode()


@pytest.mark.parametrize("given_bos", [0, 1, 2])
def test_exactly_one_bos_where_the_model_wants_one(given_bos: int) -> None:  # B11
    tokenizer = make_tokenizer(adds_bos=True)
    assert tokenizer.with_bos([BOS] * given_bos + [TokenId(5)]) == [BOS, 5]


def test_no_bos_is_added_or_taken_where_the_model_wants_none() -> None:  # B11
    tokenizer = make_tokenizer(adds_bos=False)
    assert tokenizer.with_bos([TokenId(5)]) == [5]
    assert tokenizer.with_bos([BOS, BOS]) == [BOS, BOS]


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_bytes(TokenId(259)) == b""
    assert tokenizer.token_bytes(TokenId(-1)) == b""


def test_decoding_shows_or_hides_control_tokens() -> None:
    tokenizer = make_tokenizer()
    ids = [IM_START, TokenId(ord("a")), IM_END]
    assert tokenizer.decode(ids) == "<|im_start|>a<|im_end|>"
    assert tokenizer.decode(ids, skip_specials=True) == "a"


def test_every_byte_has_its_own_character() -> None:
    assert sorted(BYTE_TO_CHARACTER) == list(range(256))
    assert all(a < b for a, b in pairwise(sorted(BYTE_TO_CHARACTER.values())))
    assert set(BYTE_TO_CHARACTER.values()) == set(ByteLevel.alphabet())


def test_bytes_of_both_ways_to_write_them() -> None:
    assert byte_level_bytes("Ġa") == b" a"
    assert byte_level_bytes("<｜x｜>") == "<｜x｜>".encode()
    assert sentencepiece_bytes("▁a▁") == b" a "
    assert sentencepiece_bytes("<0x0A>") == b"\n"
