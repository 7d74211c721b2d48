"""The tools of a chat request, read once: what may be called, whether it must be, and by which schema.

    tools                 [{"type": "function", "function": {"name", "description", "parameters", "strict"}}]
    tool_choice           "none" | "auto" | "required" | {"type": "function", "function": {"name"}}
    parallel_tool_calls   false: at most one call in an answer

Not here: how a model family writes a call (`tool_dialects`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvpilot_engine.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolMode(StrEnum):
    """Whether an answer may, or must, call a tool."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_ARGUMENTS))
    """JSON schema of an object."""
    is_strict: bool = False
    """A schema that can't be enforced in full is refused; else what can't be enforced is left to the model."""
    place: str = "tools[0]"
    """Where it stands in the request, for messages."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """At least one tool, and an answer that may call."""

    definitions: list[Any]
    """All tools as the client wrote them: what the chat template shows the model."""
    tools: tuple[Tool, ...]
    """Those that may be called: all, or the one that tool_choice names."""
    mode: ToolMode = ToolMode.AUTO
    is_parallel: bool = True
    """More than one call in an answer is allowed."""


def parse_tools(tools: object, tool_choice: object = None, parallel_tool_calls: object = None) -> ToolRequest | None:
    """Read the three fields of a body; None when the answer may not call any. Raises InvalidRequestError."""
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise InvalidRequestError("parallel_tool_calls must be true or false", param="parallel_tool_calls")
    parsed = _parse_list(tools)
    if tool_choice is None:
        tool_choice = "auto" if parsed else "none"
    if not parsed and tool_choice not in ("none", "auto"):
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    name = _read_choice(tool_choice)
    if tool_choice == "none" or not parsed:
        return None
    assert isinstance(tools, list)
    is_parallel = parallel_tool_calls is not False
    if name is None:
        return ToolRequest(tools, parsed, ToolMode(str(tool_choice)), is_parallel)
    chosen = tuple(tool for tool in parsed if tool.name == name)
    if not chosen:
        raise InvalidRequestError(
            f"tool_choice names {name!r:.80}, which is not one of tools", param="tool_choice.function.name"
        )
    return ToolRequest(tools, chosen, ToolMode.REQUIRED, is_parallel=False)


def _read_choice(choice: object) -> str | None:
    """The name that tool_choice asks for, if it does."""
    if choice in ("none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    return name


def _parse_list(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    parsed = tuple(_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for tool in parsed:
        if tool.name in seen:
            raise InvalidRequestError(
                f"{tool.place}.function.name is {tool.name!r}, as another tool's", param=f"{tool.place}.function.name"
            )
        seen.add(tool.name)
    return parsed


def _parse_tool(tool: object, place: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{place}.type is {kind!r:.40}; it must be function", param=f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{place}.function must be an object", param=f"{place}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{place}.function.name is {name!r:.80}; it must be 1 to 64 letters, digits, _, - or dots",
            param=f"{place}.function.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequestError(
            f"{place}.function.description must be a string", param=f"{place}.function.description"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{place}.function.strict must be true or false", param=f"{place}.function.strict")
    parameters = _read_parameters(function.get("parameters"), f"{place}.function.parameters")
    return Tool(name, parameters, is_strict=bool(strict), place=place)


def _read_parameters(parameters: object, place: str) -> dict[str, Any]:
    if parameters is None:
        return dict(_NO_ARGUMENTS)
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"{place} must be a JSON schema, an object", param=place)
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{place}.type is {parameters['type']!r:.40}; arguments are an object", param=f"{place}.type"
        )
    return {**parameters, "type": "object"}
