"""What becomes of a body: every sampling field reaches the engine as it was meant, with the model's defaults."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvpilot_engine.core.grammar import GrammarKind
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.errors import InvalidRequestError, NeverFitsError
from kvpilot_engine.server.prepared_call import CallOptions, PreparedCall
from kvpilot_engine.server.request_builder import RequestBuilder
from kvpilot_engine.text.model_text import GenerationDefaults, ModelText
from kvpilot_engine.text.testing import make_model_text, make_tokenizer

TOKENIZER = make_tokenizer(merged=[b" ab", b"ab"], adds_bos=True)
AB, SPACE_AB, BOS, IM_END = (
    TOKENIZER.encode(text, specials_as_text=False)[0] for text in ("ab", " ab", "<|bos|>", "<|im_end|>")
)
DEFAULTS: dict[str, Any] = {
    "served_names": ("m",),
    "max_model_len": 64,
    "vocab_size": TOKENIZER.vocab_size,
    "max_logprobs": 20,
}
OPTIONS = CallOptions(created=7)


def make_builder(text: ModelText | None = None, **options: Any) -> RequestBuilder:
    text = text or make_model_text(tokenizer=TOKENIZER)
    return RequestBuilder(
        text,
        **DEFAULTS | options,
    )


def prepare(builder: RequestBuilder | None = None, options: CallOptions = OPTIONS, **fields: Any) -> PreparedCall:
    """A completion's body."""
    return (builder or make_builder()).prepare_completion(json.dumps({"prompt": "x", **fields}).encode(), options)


def prepare_chat(builder: RequestBuilder | None = None, **fields: Any) -> PreparedCall:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return (builder or make_builder()).prepare_chat(json.dumps(body).encode(), OPTIONS)


def sampling(**fields: Any) -> SamplingParams:
    return prepare(**fields).requests[0].sampling


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.25}, "top_p", 0.25),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**30}, "top_k", TOKENIZER.vocab_size),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"presence_penalty": -2}, "presence_penalty", -2),
        ({"frequency_penalty": 2}, "frequency_penalty", 2),
        ({"repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"logit_bias": {"5": -100, "7": 1.5}}, "logit_bias", ((5, -100), (7, 1.5))),
        ({"bad_words": ["ab"]}, "bad_words", ((AB,), (SPACE_AB,))),
        ({"bad_words": [" ab"]}, "bad_words", ((SPACE_AB,),)),
        ({"bad_words": ["<|im_end|>"]}, "bad_words", ((IM_END,), (32, IM_END))),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"seed": 9}, "seed", 9),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({}, "max_tokens", 16),
        ({"stop_token_ids": [5]}, "stop_token_ids", {5, IM_END}),
        ({"stop_token_ids": [5], "ignore_eos": True}, "stop_token_ids", {5}),
        ({"ignore_eos": True}, "stop_token_ids", set()),
        ({"logprobs": 3}, "logprobs", 3),
        ({"logprobs": 0}, "logprobs", 0),
        ({}, "logprobs", None),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"echo": True}, "prompt_logprobs", None),
        ({"echo": True, "logprobs": 2}, "prompt_logprobs", 2),
        ({"echo": True, "max_tokens": 0}, "prompt_logprobs", 0),
        ({"best_of": 2}, "logprobs", 0),
    ],
)
def test_field_reaches_the_engine(fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(sampling(**fields), name) == value


def test_absent_fields_take_the_model_s_defaults_and_present_ones_win() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1)
    builder = make_builder(make_model_text(tokenizer=TOKENIZER, generation_defaults=defaults))
    names = [field.name for field in dataclasses.fields(GenerationDefaults)]
    absent = prepare(builder).requests[0].sampling
    assert [getattr(absent, name) for name in names] == [getattr(defaults, name) for name in names]
    own: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    present = prepare(builder, **own).requests[0].sampling
    assert [getattr(present, name) for name in names] == [0 if name == "top_k" else own[name] for name in names]


def test_chat_asks_for_log_probabilities_by_two_fields() -> None:
    assert prepare_chat().requests[0].sampling.logprobs is None
    assert prepare_chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert prepare_chat(logprobs=True, top_logprobs=7).requests[0].sampling.logprobs == 7


def test_priority_salt_and_grammar_are_the_request_s() -> None:
    call = prepare(n=2, priority=-3, cache_salt="tenant", guided_regex="a+")
    assert [(r.priority, r.cache_salt, r.choice) for r in call.requests] == [(-3, "tenant", 0), (-3, "tenant", 1)]
    grammar = call.requests[0].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.REGEX, "a+")
    chat = prepare_chat(response_format={"type": "json_object"}).requests[0].grammar
    assert chat is not None
    assert chat.kind is GrammarKind.JSON_OBJECT


def test_salt_of_the_body_is_refused_where_a_header_brings_it() -> None:  # A12
    builder = make_builder(takes_salt=False)
    with pytest.raises(InvalidRequestError, match="--cache-salt-header") as refused:
        prepare(builder, cache_salt="someone else's")
    assert refused.value.param == "cache_salt"
    call = prepare(builder, CallOptions(created=1, cache_salt="from the gateway"))
    assert call.requests[0].cache_salt == "from the gateway"


def test_candidates_beyond_n_are_generated_for_each_prompt() -> None:
    call = prepare(prompt=["x", "yz"], n=1, best_of=3)
    assert (call.num_choices, call.num_candidates, len(call.requests)) == (1, 3, 6)
    assert [request.choice for request in call.requests] == [0, 1, 2, 0, 1, 2]
    assert call.num_prompt_tokens == 2 + 3  # each with its BOS


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
def test_best_of_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:  # B14
    with pytest.raises(InvalidRequestError, match="best_of is") as refused:
        prepare(**fields)
    assert refused.value.param == "best_of"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "after"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": [[1], [300]]}, "prompt"),
        ({"stop_token_ids": [TOKENIZER.vocab_size]}, "stop_token_ids"),
    ],
)
def test_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:  # B6, B13, B14
    with pytest.raises(InvalidRequestError) as refused:
        prepare(**fields)
    assert refused.value.param == param


def test_refusal_shows_the_value() -> None:
    with pytest.raises(InvalidRequestError, match=r"^temperature is 2\.1: .*less than or equal to 2"):
        prepare(temperature=2.1)
    with pytest.raises(InvalidRequestError, match="at most 5"):
        prepare(make_builder(max_logprobs=5), logprobs=6)


def test_number_too_large_for_a_float_is_refused() -> None:  # B14
    raw = b'{"prompt": "x", "repetition_penalty": 1e999}'
    with pytest.raises(InvalidRequestError) as refused:
        make_builder().prepare_completion(raw, OPTIONS)
    assert refused.value.param == "repetition_penalty"


def test_bos_is_added_once_and_not_when_told_so() -> None:  # B11
    def ids(**fields: Any) -> list[int]:
        return list(prepare(**fields).requests[0].prompt_token_ids)

    assert ids(prompt="x") == [BOS, 120]
    assert ids(prompt="<|bos|>x") == [BOS, 120]
    assert ids(prompt="x", add_special_tokens=False) == [120]
    assert ids(prompt=[120]) == [120]
    chat = prepare_chat(add_special_tokens=True).requests[0].prompt_token_ids
    assert chat.count(BOS) == 1


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"truncate_prompt_tokens": 10}, 10),
        ({"truncate_prompt_tokens": -1}, 48),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, 4),
        ({"truncate_prompt_tokens": 63, "max_tokens": 1}, 63),
    ],
)
def test_truncated_prompts_keep_their_end(fields: dict[str, Any], num_tokens: int) -> None:
    for prompt in ("x" * 99_999 + "yz", [120] * 900 + [121, 122]):
        ids = prepare(prompt=prompt, **fields).requests[0].prompt_token_ids
        assert len(ids) == num_tokens
        assert ids[-2:] == (121, 122)


def test_scored_prompt_may_fill_the_context() -> None:  # B7
    call = prepare(prompt=[120] * 64, max_tokens=0, echo=True, logprobs=1)
    assert (call.requests[0].sampling.max_tokens, call.num_prompt_tokens) == (0, 64)
    with pytest.raises(NeverFitsError):
        prepare(prompt=[120] * 65, max_tokens=0, echo=True)
    with pytest.raises(NeverFitsError):
        prepare(prompt=[120] * 64, echo=True)


def test_echo_is_the_prompt_as_it_was_sent() -> None:
    call = prepare(prompt=["ab x", "<|im_end|>"], echo=True)
    assert [(echo.text, echo.offsets) for echo in call.echoes] == [
        ("ab x", (0, 0, 2, 3)),
        ("<|im_end|>", (0, 0)),
    ]
    of_ids = prepare(prompt=[BOS, AB, IM_END], echo=True).echoes[0]
    assert (of_ids.text, of_ids.offsets) == ("<|bos|>ab<|im_end|>", (0, 7, 9))


def test_final_message_is_continued_without_a_new_turn() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is "}]
    body = json.dumps({"messages": messages, "continue_final_message": True}).encode()
    call = make_builder(max_model_len=200).prepare_chat(body, OPTIONS)
    text = TOKENIZER.decode(call.requests[0].prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
