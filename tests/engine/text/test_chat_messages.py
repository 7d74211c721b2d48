"""B17, B18: what agent loops send is accepted and brought into one form; what is refused is named."""

from __future__ import annotations

import pytest

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.chat_messages import normalize_messages
from kvpilot_engine.text.text_validation import require_encodable

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 9, "b": 9}'}}


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("answer", ["18", [{"type": "text", "text": "18"}]])
def test_agent_histories_are_accepted_in_every_form(empty: dict[str, object], answer: object) -> None:  # B18
    messages = normalize_messages(
        [
            {"role": "user", "content": "9 + 9?"},
            {"role": "assistant", "tool_calls": [CALL], **empty},
            {"role": "tool", "tool_call_id": "c1", "content": answer},
            {"role": "user", "content": "Thanks"},
        ]
    )
    assert [message["content"] for message in messages] == ["9 + 9?", "", "18", "Thanks"]
    assert messages[1]["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": {"a": 9, "b": 9}}}]


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}])
def test_an_assistant_that_said_nothing_is_an_empty_turn(message: dict[str, object]) -> None:  # B18
    assert normalize_messages([message]) == [{"role": "assistant", "content": ""}]


def test_parts_are_joined_by_lines() -> None:  # B18
    content = ["a", {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}, {"type": "text", "text": ""}]
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("arguments", "expected"), [(None, {}), ("", {}), ({"a": 1}, {"a": 1}), ("[1]", [1]), ('{"a":', '{"a":')]
)
def test_arguments_become_objects_where_they_are_json(arguments: object, expected: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = normalize_messages([{"role": "assistant", "tool_calls": [call]}])
    assert messages[0]["tool_calls"] == [{"function": {"name": "f", "arguments": expected}}]


def test_the_messages_given_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    given = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    normalize_messages(given)
    assert given == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_unknown_fields_pass_and_null_ones_are_dropped() -> None:
    message = {"role": "user", "content": "x", "name": "Eva", "audio": None, "extra": 1}
    assert normalize_messages([message]) == [{"role": "user", "content": "x", "name": "Eva", "extra": 1}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"text": "x"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["x", {"type": "text"}]}, "messages[0].content[1].text"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [None]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(message: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        normalize_messages([message])
    assert error.value.param == param
    assert param in str(error.value)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as error:
        normalize_messages([])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a\ud800"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": "x", "tool_call_id": "\ud800"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "\ud800": 1}, "messages[0] (a key)"),
    ],
)
def test_a_lone_surrogate_is_refused_by_its_place(message: object, param: str) -> None:  # B17
    with pytest.raises(InvalidRequestError, match="lone surrogate U\\+D") as error:
        normalize_messages([message])
    assert error.value.param == param
    str(error.value).encode()


def test_whole_surrogate_pairs_are_characters() -> None:  # B17
    require_encodable({"stop": ["😀", "\U0010ffff"]}, "body")
    with pytest.raises(InvalidRequestError) as error:
        require_encodable(["ok", "\ud83d \ude00"], "stop")
    assert error.value.param == "stop[1]"
