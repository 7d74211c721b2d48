"""B3: characters that span tokens are held back, everything comes out in the end, nothing else does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.incremental_detokenizer import IncrementalDetokenizer
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.testing import make_tokenizer
from kvpilot_engine.text.tokenizer import Tokenizer

LONGEST_HELD = 3
TOKENIZER = make_tokenizer(merged=["é".encode() + b"\xed\x95", "한".encode(), b" a", b"\xf0\x9f"])
TOKENIZER_IDS = st.integers(0, TOKENIZER.vocab_size - 1).map(TokenId)


def _stream(tokenizer: Tokenizer, steps: Iterable[Iterable[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push(TokenId(i) for i in ids) for ids in steps]
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦", "Příliš žluťoučký kůň", "키스의 고유조건은", "天地玄黃，宇宙洪荒", "a 🇨🇿 b"]
)
def test_text_split_into_single_bytes_comes_out_whole(text: str) -> None:  # B3
    deltas = _stream(make_tokenizer(), [[byte] for byte in text.encode()])
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


def test_a_token_with_a_full_and_a_half_character_gives_the_full_one_at_once() -> None:  # B3
    full_and_half = TOKENIZER.encode("é한", specials_as_text=True)[0]
    assert TOKENIZER.token_bytes(full_and_half) == "é".encode() + b"\xed\x95"
    assert _stream(TOKENIZER, [[full_and_half], [0x9C]]) == ["é", "한", ""]


def test_an_output_that_ends_in_half_a_character_ends_in_one_replacement_character() -> None:  # B3
    assert _stream(TOKENIZER, [[ord("a")], [0xF0], [0x9F], [0x98]]) == ["a", "", "", "", "\ufffd"]


def test_invalid_bytes_are_not_waited_for() -> None:  # B3
    assert _stream(TOKENIZER, [[0xFF], [0x80], [0xE0, 0x20], [ord("x")]]) == ["\ufffd", "\ufffd", "\ufffd ", "x", ""]


def test_a_token_that_starts_with_a_space_does_not_flush_half_a_character() -> None:  # B3
    space_a = TOKENIZER.encode(" a", specials_as_text=True)[0]
    assert _stream(TOKENIZER, [[0xED, 0x95], [0x9C], [space_a]]) == ["", "한", " a", ""]


def test_control_tokens_and_unknown_ids_add_nothing() -> None:
    control = min(TOKENIZER.special_ids)
    assert _stream(TOKENIZER, [[control], [0xED, 0x95, control, 0x9C], [TOKENIZER.vocab_size + 7]]) == [
        "",
        "한",
        "",
        "",
    ]


@given(st.lists(st.lists(TOKENIZER_IDS, max_size=4), max_size=20))
def test_joined_deltas_are_the_whole_text_however_it_was_cut(steps: list[list[TokenId]]) -> None:  # B3
    deltas = _stream(TOKENIZER, steps)
    assert "".join(deltas) == TOKENIZER.decode((i for ids in steps for i in ids), skip_specials=True)


@given(st.lists(TOKENIZER_IDS, max_size=40))
def test_never_more_than_three_bytes_are_held(ids: list[TokenId]) -> None:  # B3
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    raw, sent = b"", ""
    for token_id in ids:
        sent += detokenizer.push([token_id])
        raw += b"" if token_id in TOKENIZER.special_ids else TOKENIZER.token_bytes(token_id)
        done = [raw[: len(raw) - held].decode("utf-8", errors="replace") for held in range(LONGEST_HELD + 1)]
        assert sent in done


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49_151).map(TokenId), max_size=30))
def test_joined_deltas_of_the_real_vocabulary_are_the_whole_text(ids: list[TokenId], smollm2_text: ModelText) -> None:
    tokenizer = smollm2_text.tokenizer
    assert "".join(_stream(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids, skip_specials=True)
