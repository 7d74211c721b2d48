"""Tool calls out of text, whatever the pieces: no markup leaks, no call is lost, what is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.text.tool_dialects import DIALECTS, HERMES, JSON, LLAMA3_JSON, MISTRAL, MISTRAL_V11, ToolDialect
from kvpilot_engine.text.tool_parser import ToolParser

Call = tuple[str, str]
"""Name and arguments."""
NAMES = ("get_weather", "now")
WEATHER = '{"city": "Br\\"no} </tool_call> ]", "days": [1, {"a": "[TOOL_CALLS]"}]}'


def make_call(dialect: ToolDialect, name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "{dialect.arguments_key}": {arguments}}}'


def parse(
    pieces: Iterable[str], dialect: ToolDialect, *, is_constrained: bool = True, is_required: bool = False
) -> tuple[str, list[Call], str]:
    """Content, calls, and what "stop" becomes. Checks the order of the deltas."""
    parser = ToolParser(dialect, NAMES, is_constrained=is_constrained, is_required=is_required)
    content = ""
    calls: list[Call] = []
    ids: set[str] = set()
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.call_id is not None:
                assert call.name is not None
                assert call.index == len(calls)
                ids.add(call.call_id)
                calls.append((call.name, call.arguments))
            else:
                assert call.name is None
                assert call.arguments
                assert call.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert len(ids) == len(calls) == parser.num_calls
    return content, calls, parser.map_finish_reason("stop")


H_CALL = f"<tool_call>\n{make_call(HERMES, 'get_weather', WEATHER)}\n</tool_call>"
NOW = '{"name": "now", "arguments": {}}'
FORMS: list[tuple[str, ToolDialect, str, str, list[Call]]] = [
    ("only text", HERMES, "Hello <b> {}\n ", "Hello <b> {}\n ", []),
    ("one call", HERMES, H_CALL, "", [("get_weather", WEATHER)]),
    ("text before", HERMES, f"I look.\n\n{H_CALL}", "I look.", [("get_weather", WEATHER)]),
    (
        "text around two calls",
        HERMES,
        f" A {H_CALL}\n<tool_call>{NOW}</tool_call>\nB ",
        " A\nB",
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    ("half a mark", HERMES, "x <tool_", "x <tool_", []),
    ("a list in one mark", HERMES, f"<tool_call>[{NOW}, {NOW}]</tool_call>", "", [("now", "{}"), ("now", "{}")]),
    (
        "keys in another order",
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "now"}</tool_call>',
        "",
        [("now", '{"a": 1}')],
    ),
    ("no closing", HERMES, f"<tool_call>{NOW}", "", [("now", "{}")]),
    ("llama text", LLAMA3_JSON, "{x} is text", "{x} is text", []),
    ("llama one call", LLAMA3_JSON, make_call(LLAMA3_JSON, "get_weather", WEATHER), "", [("get_weather", WEATHER)]),
    ("llama tag", LLAMA3_JSON, f"<|python_tag|>{make_call(LLAMA3_JSON, 'now', '{}')}", "", [("now", "{}")]),
    (
        "llama two calls",
        LLAMA3_JSON,
        f"\n{make_call(LLAMA3_JSON, 'now', '{}')} ; {make_call(LLAMA3_JSON, 'get_weather', WEATHER)}",
        "",
        [("now", "{}"), ("get_weather", WEATHER)],
    ),
    ("llama other JSON", LLAMA3_JSON, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama text with a call", LLAMA3_JSON, f"See {NOW}", f"See {NOW}", []),
    ("llama half an object", LLAMA3_JSON, ' {"na', ' {"na', []),
    ("mistral text", MISTRAL, "a [TOOL] b", "a [TOOL] b", []),
    (
        "mistral list",
        MISTRAL,
        f"Let me see. [TOOL_CALLS] [{make_call(MISTRAL, 'get_weather', WEATHER)},\n {NOW}]",
        "Let me see.",
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    (
        "mistral with names",
        MISTRAL_V11,
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
        "",
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    ("json one", JSON, f"{NOW}\n", "", [("now", "{}")]),
    ("json list", JSON, f"[{NOW}, {NOW}]", "", [("now", "{}"), ("now", "{}")]),
    ("json parameters", JSON, '{"name": "now", "parameters": {"a": []}}', "", [("now", '{"a": []}')]),
    ("json other list", JSON, "[1, 2]", "[1, 2]", []),
    ("json text", JSON, "Hi\n", "Hi\n", []),
]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"), [form[1:] for form in FORMS], ids=[f[0] for f in FORMS]
)
@pytest.mark.parametrize("is_constrained", [True, False])
def test_every_form_is_read_whole(
    dialect: ToolDialect, text: str, content: str, calls: list[Call], is_constrained: bool
) -> None:
    reason = "tool_calls" if calls else "stop"
    assert parse([text], dialect, is_constrained=is_constrained) == (content, calls, reason)


@pytest.mark.parametrize(("dialect", "text"), [form[1:3] for form in FORMS], ids=[f[0] for f in FORMS])
@pytest.mark.parametrize("is_constrained", [True, False])
def test_every_form_is_read_the_same_letter_by_letter(dialect: ToolDialect, text: str, is_constrained: bool) -> None:
    whole = parse([text], dialect, is_constrained=is_constrained)
    assert parse(text, dialect, is_constrained=is_constrained) == whole


BROKEN: list[tuple[str, ToolDialect, str, list[Call]]] = [
    ("no JSON", HERMES, "a <tool_call>get_weather(1)</tool_call>", []),
    ("unknown name", HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ("no name", HERMES, '<tool_call>{"arguments": {}}</tool_call>', []),
    ("no arguments", HERMES, '<tool_call>{"name": "now"}</tool_call>', []),
    ("arguments are no object", HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    ("arguments are not JSON", HERMES, '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>', []),
    ("half a call", HERMES, '<tool_call>{"name": "now", "arguments": {"a"', []),
    ("a call after a broken one", HERMES, f"<tool_call>{H_CALL}", [("get_weather", WEATHER)]),
    ("no list", MISTRAL, f"[TOOL_CALLS]{NOW}", []),
    ("a list that breaks", MISTRAL, f"[TOOL_CALLS][{NOW}, 5]", [("now", "{}")]),
    ("no arguments mark", MISTRAL_V11, "[TOOL_CALLS]now {}", []),
    ("trailing text", JSON, f"{NOW} and more", [("now", "{}")]),
]


@pytest.mark.parametrize(("dialect", "text", "calls"), [form[1:] for form in BROKEN], ids=[f[0] for f in BROKEN])
def test_what_proves_to_be_no_call_is_text_again(dialect: ToolDialect, text: str, calls: list[Call]) -> None:
    content, found, _ = parse([text], dialect, is_constrained=False)
    assert found == calls
    assert parse(text, dialect, is_constrained=False) == parse([text], dialect, is_constrained=False)
    if not calls:
        assert content == text


MARKUP = st.sampled_from(
    [
        *(mark for dialect in DIALECTS.values() for mark in dialect.marks),
        *(
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            ":",
            " ",
            "\n",
            '"',
            "\\",
            "a",
            "<",
            NOW,
            '{"name": "now", ',
            '"arguments": ',
            "{}",
        ),
    ]
)


@given(
    st.sampled_from(sorted(DIALECTS)),
    st.lists(MARKUP, max_size=12).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_pieces_never_matter(name: str, text: str, sizes: list[int]) -> None:
    pieces: list[str] = []
    rest = text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    whole = parse([text], DIALECTS[name], is_constrained=False)
    assert parse(pieces, DIALECTS[name], is_constrained=False) == whole
    for _, arguments in whole[1]:
        assert isinstance(json.loads(arguments), dict)


def test_arguments_flow_before_the_call_is_complete() -> None:
    parser = ToolParser(HERMES, NAMES, is_constrained=True)
    first = parser.push('<tool_call>\n{"name": "now", "arguments": {"zo')
    assert [(call.index, call.name, call.arguments) for call in first.calls] == [(0, "now", '{"zo')]
    second = parser.push('ne": "')
    assert [(call.index, call.name, call.arguments) for call in second.calls] == [(0, None, 'ne": "')]
    assert parser.map_finish_reason("length") == "length"


def test_unconstrained_calls_are_held_until_they_are_complete() -> None:
    parser = ToolParser(HERMES, NAMES, is_constrained=False)
    assert parser.push('<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}').calls == ()
    assert [call.arguments for call in parser.push("}").calls] == ['{"zone": "CET"}']


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_that_was_cut_is_no_reason_to_run_tools(reason: str) -> None:
    parser = ToolParser(HERMES, NAMES, is_constrained=True)
    parser.push('<tool_call>{"name": "now", "arguments": {"zo')
    assert parser.finish().content == ""
    assert parser.map_finish_reason(reason) == reason


@pytest.mark.parametrize(("dialect", "text"), [(HERMES, '<tool_call>\n{"name": "no'), (JSON, ' {"name": "no')])
def test_the_beginning_of_a_forced_call_never_leaks(dialect: ToolDialect, text: str) -> None:
    assert parse(text, dialect, is_required=True) == ("", [], "stop")


def test_ids_have_the_form_that_the_family_takes_back() -> None:
    def new_id(dialect: ToolDialect) -> str:
        call_id = ToolParser(dialect, NAMES, is_constrained=True)
        text = f"{dialect.opening}[{NOW}]" if dialect.begins_list else f"{dialect.opening}{NOW}"
        (call,) = call_id.push(text).calls
        assert call.call_id is not None
        return call.call_id

    assert new_id(HERMES).startswith("call_")
    assert len(new_id(MISTRAL)) == 9
    assert new_id(MISTRAL).isalnum()
    assert new_id(MISTRAL) != new_id(MISTRAL)


def test_a_deep_value_is_text_not_a_crash() -> None:
    text = '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 50_000
    content, calls, _ = parse([text + "}" * 50_001], HERMES, is_constrained=False)
    assert calls == []
    assert content.startswith('<tool_call>{"name": "now"')
