"""The tools of a request: what is accepted, what tool_choice leaves, and refusals with the place."""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.testing import make_tool
from kvpilot_engine.text.tool_definitions import MAX_TOOLS, ToolMode, parse_tools

TOOLS = [make_tool("find", {"type": "object", "properties": {"q": {"type": "string"}}}), make_tool("now")]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tools", "choice"), [(None, None), ([], None), (None, "none"), ([], "auto"), (TOOLS, "none"), (None, "auto")]
)
def test_no_tools_or_choice_none_means_no_calls(tools: object, choice: object) -> None:
    assert parse_tools(tools, choice) is None


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_parallel"),
    [
        (None, ToolMode.AUTO, ["find", "now"], True),
        ("auto", ToolMode.AUTO, ["find", "now"], True),
        ("required", ToolMode.REQUIRED, ["find", "now"], True),
        (NAMED, ToolMode.REQUIRED, ["now"], False),
    ],
)
def test_choice_says_which_tools_and_whether_they_must_be_called(
    choice: object, mode: ToolMode, names: list[str], is_parallel: bool
) -> None:
    request = parse_tools(TOOLS, choice)
    assert request is not None
    assert (request.mode, [tool.name for tool in request.tools], request.is_parallel) == (mode, names, is_parallel)
    assert request.definitions == TOOLS


def test_parallel_calls_can_be_switched_off() -> None:
    request = parse_tools(TOOLS, "auto", parallel_tool_calls=False)
    assert request is not None
    assert not request.is_parallel


def test_a_tool_without_parameters_takes_none() -> None:
    request = parse_tools([make_tool("now")])
    assert request is not None
    assert request.tools[0].parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_parameters_without_a_type_are_an_object() -> None:
    request = parse_tools([make_tool("now", {"properties": {}}, strict=True)])
    assert request is not None
    assert request.tools[0].parameters["type"] == "object"
    assert request.tools[0].is_strict


def with_function(**changed: Any) -> list[Any]:
    tool = make_tool("now")
    return [TOOLS[0], {**tool, "function": {**tool["function"], **changed}}]


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param"),
    [
        ({}, None, None, "tools"),
        ("now", None, None, "tools"),
        ([TOOLS[0]] * (MAX_TOOLS + 1), None, None, "tools"),
        ([5], None, None, "tools[0].type"),
        ([{"type": "web_search"}], None, None, "tools[0].type"),
        ([{"type": "function"}], None, None, "tools[0].function"),
        (with_function(name=""), None, None, "tools[1].function.name"),
        (with_function(name="two words"), None, None, "tools[1].function.name"),
        (with_function(name="find"), None, None, "tools[1].function.name"),
        (with_function(name=None), None, None, "tools[1].function.name"),
        (with_function(strict="yes"), None, None, "tools[1].function.strict"),
        (with_function(description=5), None, None, "tools[1].function.description"),
        (with_function(parameters=[]), None, None, "tools[1].function.parameters"),
        (with_function(parameters={"type": "string"}), None, None, "tools[1].function.parameters.type"),
        (TOOLS, "any", None, "tool_choice"),
        (TOOLS, 1, None, "tool_choice"),
        (TOOLS, {"type": "function"}, None, "tool_choice"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {}}, None, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "rm"}}, None, "tool_choice.function.name"),
        (None, "required", None, "tool_choice"),
        (None, NAMED, None, "tool_choice"),
        (TOOLS, None, "no", "parallel_tool_calls"),
    ],
)
def test_a_refusal_names_the_place(tools: object, choice: object, parallel: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        parse_tools(tools, choice, parallel)
    assert refusal.value.param == param
