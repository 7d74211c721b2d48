"""One output while it grows: what is told when, with characters over token borders and stop strings in the way."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.server.candidate import Candidate
from kvpilot_engine.server.deltas import Delta
from kvpilot_engine.server.prepared_call import CallOptions, PreparedCall
from kvpilot_engine.server.request_builder import RequestBuilder
from kvpilot_engine.text.testing import make_model_text, make_tokenizer

TOKENIZER = make_tokenizer(merged=[b"EN"])
END = TOKENIZER.encode("<|im_end|>", specials_as_text=False)[0]
BUILDER = RequestBuilder(
    make_model_text(tokenizer=TOKENIZER),
    served_names=("m",),
    max_model_len=1000,
    vocab_size=TOKENIZER.vocab_size,
    max_logprobs=5,
)


def prepare(**fields: Any) -> PreparedCall:
    raw = json.dumps({"prompt": "p", "max_tokens": 900, **fields}).encode()
    return BUILDER.prepare_completion(raw, CallOptions(created=0))


def run(call: PreparedCall, ids: list[TokenId], end: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    """One token a step, as the engine would: until the ids are over or a stop string was found."""
    candidate = Candidate(0, call, TOKENIZER)
    deltas: list[Delta] = []
    for position, token in enumerate(ids):
        is_last = position == len(ids) - 1
        output = SequenceOutput(
            RequestId("r"),
            (token,),
            finish_reason=end if is_last else None,
            logprobs=(TokenLogprobs(token, -float(position), 1),) if call.num_top is not None else (),
        )
        deltas.append(candidate.advance(output))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def told(deltas: list[Delta]) -> list[tuple[str, list[float]]]:
    """The text of each delta, with the positions of its tokens (which are their log-probabilities)."""
    return [
        (delta.text, [-token.logprobs.logprob for token in delta.tokens if token.logprobs is not None])
        for delta in deltas
        if delta.is_news
    ]


def encode(text: str) -> list[TokenId]:
    return TOKENIZER.encode(text, specials_as_text=False)


def test_tokens_go_out_with_the_character_they_are_part_of() -> None:  # B3
    assert told(run(prepare(logprobs=0), encode("aéb"))) == [("a", [0]), ("é", [1, 2]), ("b", [3])]


def test_tokens_of_a_stop_string_are_dropped_with_its_text() -> None:  # B4
    deltas = run(prepare(logprobs=0, stop="END"), encode("aENDb"))
    assert told(deltas) == [("a", [0]), ("", [])]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")


def test_token_that_a_stop_string_cuts_in_two_is_told() -> None:  # B4
    deltas = run(prepare(logprobs=0, stop="N"), encode("aENb"))
    assert told(deltas) == [("a", [0]), ("E", [1])]


def test_held_tokens_go_out_when_no_stop_string_came_of_them() -> None:  # B4
    assert told(run(prepare(logprobs=0, stop="END"), encode("aENx"))) == [("a", [0]), ("ENx", [1, 2])]


def test_kept_stop_strings_are_text() -> None:
    deltas = run(prepare(logprobs=0, stop="END", include_stop_str_in_output=True), encode("aENDb"))
    assert told(deltas) == [("a", [0]), ("END", [1, 2])]
    assert deltas[-1].stop_reason == "END"


def test_control_tokens_are_told_with_what_follows() -> None:
    assert told(run(prepare(logprobs=0), encode("a<|bos|>b"))) == [("a", [0]), ("b", [1, 2])]
    shown = run(prepare(logprobs=0, skip_special_tokens=False), encode("a<|bos|>b"))
    assert told(shown) == [("a", [0]), ("<|bos|>", [1]), ("b", [2])]


def test_text_of_the_first_min_tokens_stops_nothing() -> None:
    deltas = run(prepare(stop="a", min_tokens=2), encode("aabab"))
    assert "".join(delta.text for delta in deltas) == "aab"
    assert deltas[-1].stop_reason == "a"


@pytest.mark.parametrize(
    ("fields", "token", "stop_reason"), [({}, END, None), ({"stop_token_ids": [98]}, TokenId(98), 98)]
)
def test_stop_reason_names_what_the_client_asked_for(
    fields: dict[str, Any], token: TokenId, stop_reason: int | None
) -> None:
    deltas = run(prepare(**fields), [*encode("a"), token], FinishReason.STOP)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop_reason)
    assert "".join(delta.text for delta in deltas) == "a"


def test_half_a_character_at_the_end_is_told_with_its_token() -> None:  # B3
    assert told(run(prepare(logprobs=0), encode("aé")[:2])) == [("a", [0]), ("�", [1])]


@given(
    st.lists(st.sampled_from([*encode("EN"), *encode("D"), *encode("é"), *encode("x"), END]), min_size=1, max_size=12),
    st.sampled_from([["END"], ["D"], ["é"], ["xEN", "EN"], []]),
    st.booleans(),
)
def test_told_tokens_are_the_first_ones_and_offsets_lie_in_the_text(
    ids: list[TokenId], stops: list[str], keeps: bool
) -> None:  # B3, B4
    call = prepare(logprobs=0, stop=stops, include_stop_str_in_output=keeps, ignore_eos=True)
    deltas = run(call, ids)
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.token_id for token in tokens] == ids[: len(tokens)]
    offsets = [token.offset for token in tokens]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    if deltas[-1].stop_reason is None:
        assert len(tokens) == len(ids)
    plain = run(dataclasses.replace(call, num_top=None), ids)
    assert "".join(delta.text for delta in plain) == text
