"""Numbers of a body: JSON knows one kind, so what is whole is an integer, however it is written."""

from __future__ import annotations

import pytest

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.server.body_parsing import parse_body
from kvpilot_engine.server.openai_schema import CompletionBody, DetokenizeBody


@pytest.mark.parametrize(
    ("written", "tokens"), [("5.0", 5), ("0.0", 0), ("-0.0", 0), ("1e3", 1000), ("9e15", 9 * 10**15)]
)
def test_whole_numbers_are_integers(written: str, tokens: int) -> None:
    body = parse_body(CompletionBody, b'{"prompt": "", "max_tokens": %b}' % written.encode())
    assert body.max_tokens == tokens
    assert isinstance(body.max_tokens, int)


@pytest.mark.parametrize("written", ["5.5", "1e16", "1e400", "5e-1", '"5"', "true"])
def test_what_is_not_exactly_an_integer_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionBody, b'{"prompt": "", "max_tokens": %b}' % written.encode())
    assert caught.value.param == "max_tokens"


def test_whole_numbers_in_lists_and_where_fractions_are_allowed() -> None:
    assert parse_body(DetokenizeBody, b'{"tokens": [65.0, 66]}').tokens == [65, 66]
    assert parse_body(CompletionBody, b'{"prompt": "", "temperature": 1.0}').temperature == 1.0
