"""Where the tokens of a prompt begin in its text, for answers that echo it."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.prompt_text import describe_prompt
from kvpilot_engine.text.testing import make_tokenizer

TOKENIZER = make_tokenizer(merged=[b"ab"], adds_bos=True)


def encode(text: str) -> list[TokenId]:
    return TOKENIZER.with_bos(TOKENIZER.encode(text, specials_as_text=False))


def test_added_bos_has_no_text_and_a_written_one_has() -> None:
    assert describe_prompt(TOKENIZER, encode("abc"), text="abc").offsets == (0, 0, 2)
    written = describe_prompt(TOKENIZER, encode("<|bos|>c"), text="<|bos|>c")
    assert (written.text, written.offsets) == ("<|bos|>c", (0, 7))


def test_ids_are_decoded_with_their_control_tokens() -> None:
    told = describe_prompt(TOKENIZER, encode("ab<|im_end|>"))
    assert (told.text, told.offsets) == ("<|bos|>ab<|im_end|>", (0, 7, 9))


def test_tokens_of_one_character_begin_where_it_does() -> None:
    assert describe_prompt(TOKENIZER, encode("aéb"), text="aéb").offsets == (0, 0, 1, 1, 2)


def test_space_that_a_tokenizer_put_in_front_is_not_counted() -> None:
    tokenizer = make_tokenizer()
    tokenizer.policy = dataclasses.replace(tokenizer.policy, drops_leading_space=True)
    told = describe_prompt(tokenizer, tokenizer.encode(" ab", specials_as_text=True), text="ab")
    assert (told.text, told.offsets) == ("ab", (0, 0, 1))


@given(st.text(max_size=20))
def test_offsets_rise_within_the_text(text: str) -> None:
    told = describe_prompt(TOKENIZER, encode(text), text=text)
    assert told.text == text
    assert list(told.offsets) == sorted(told.offsets)
    assert all(0 <= offset <= len(text) for offset in told.offsets)
