"""The grammar of an answer that may or must call tools, in the dialect of the model's family.

    auto       text, and from an opening on nothing but a call of a known tool with arguments by its schema
    required   such calls and nothing else

Where calls have no opening of their own (`opens_anywhere` is False), text may be anything that does not begin like a
call of a known tool: `{"name": "find"` can only go on as a call of find, `{"name": "Ann"` is text.
A schema that can't be enforced is refused for a strict tool; for another one, arguments are any JSON object.
Not here: reading the calls (`tool_parser`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.tool_definitions import Tool, ToolMode, ToolRequest
from kvpilot_engine.text.tool_dialects import ToolDialect

_LOG = logging.getLogger(__name__)
MAX_TOOL_GRAMMAR_CHARS = 256 * 1024
_ANY_OBJECT = {"type": "object"}
_SPACE = r"[\x20\r\n\t]*"
_BREAK = r"[\x20\n]{0,4}"
"""The white space that is offered around a call."""


def build_tool_grammar(
    request: ToolRequest, dialect: ToolDialect, mark_ids: Mapping[str, TokenId], content: GrammarSpec | None = None
) -> GrammarSpec | None:
    """None: the output can't be constrained, and a parser must look at each call (only with ToolMode.AUTO).

    `mark_ids` are those of the dialect's marks that are control tokens; `content` is what text must match.
    Raises InvalidRequestError.
    """
    from kvpilot_engine.text.grammar_source import find_problem

    grammar = _build(request, dialect, mark_ids, content)
    problem = _check_size(grammar) or find_problem(grammar)
    if problem:
        request = replace(request, tools=tuple(map(_soften, request.tools)))
        grammar = _build(request, dialect, mark_ids, content)
        problem = _check_size(grammar) or find_problem(grammar)
    if not problem:
        return grammar
    if request.mode is ToolMode.AUTO and content is None and not any(tool.is_strict for tool in request.tools):
        _LOG.warning("calls of %d tools are checked after they are written: too large to enforce", len(request.tools))
        return None
    raise InvalidRequestError(f"tools can't be enforced: {problem}", param="tools")


def _check_size(grammar: GrammarSpec) -> str:
    size = len(grammar.text)
    return f"their grammar has {size} characters, more than {MAX_TOOL_GRAMMAR_CHARS}" * (size > MAX_TOOL_GRAMMAR_CHARS)


def _soften(tool: Tool) -> Tool:
    """The tool with a schema that can be enforced."""
    from kvpilot_engine.text.grammar_source import embed_schema, find_problem

    arguments = embed_schema(dict(tool.parameters), is_lenient=not tool.is_strict)
    problem = find_problem(GrammarSpec(GrammarKind.LARK, f"start: {arguments}"))
    if not problem:
        return tool
    if tool.is_strict:
        place = f"{tool.place}.function.parameters"
        raise InvalidRequestError(f"{place} can't be enforced: {problem}", param=place)
    # The problem may quote the client's schema, which is no matter for a log.
    _LOG.warning("arguments of %s are any JSON object: its schema can't be enforced", tool.place)
    return replace(tool, parameters=_ANY_OBJECT)


def _build(
    request: ToolRequest, dialect: ToolDialect, mark_ids: Mapping[str, TokenId], content: GrammarSpec | None
) -> GrammarSpec:
    writer = _GrammarWriter(request, dialect, mark_ids)
    writer.write(content)
    rules = "\n".join(f"{name}: {body}" for name, body in writer.rules.items())
    return GrammarSpec(GrammarKind.LARK, f"%llguidance {{}}\n{rules}\n")


class _GrammarWriter:
    """Lark in llguidance's dialect: `<[5]>` is token 5, a lazy rule ends with its first match."""

    def __init__(self, request: ToolRequest, dialect: ToolDialect, mark_ids: Mapping[str, TokenId]) -> None:
        self._request = request
        self._dialect = dialect
        self._mark_ids = mark_ids
        self.rules: dict[str, str] = {}

    def write(self, content: GrammarSpec | None) -> None:
        self.rules["BREAK"] = r"/[\x20\n]{1,4}/"
        self._write_call()
        self._write_calls()
        self._write_called()
        if self._request.mode is ToolMode.REQUIRED:
            self.rules["start"] = "called"
        elif content is not None:
            self.rules["start"] = "formatted | called"
            self.rules["formatted"] = _embed_content(content)
        else:
            self.rules["TEXT"] = "/(?s:.*)/"
            self._write_auto()

    def _write_call(self) -> None:
        """A call of any tool, without what stands around calls."""
        from kvpilot_engine.text.grammar_source import embed_schema

        tools = self._request.tools
        self.rules["call"] = " | ".join(f"call_{index}" for index in range(len(tools)))
        mark = self._dialect.arguments_mark
        for index, tool in enumerate(tools):
            arguments = embed_schema(dict(tool.parameters), is_lenient=not tool.is_strict)
            if mark:
                self.rules[f"call_{index}"] = f"{json.dumps(tool.name)} {self._mark(mark)} {arguments}"
            else:
                self.rules[f"call_{index}"] = f"HEAD_{index} {arguments} TAIL"
                self.rules[f"HEAD_{index}"] = f"/{self._head(tool)}/"
                self.rules["TAIL"] = rf"/{_BREAK}\}}/"

    def _head(self, tool: Tool) -> str:
        colon = r"\x20?:\x20?"
        key = self._dialect.arguments_key
        return rf'{_BREAK}\{{{_BREAK}"name"{colon}"{_escape(tool.name)}"\x20?,{_BREAK}"{key}"{colon}'

    def _write_calls(self) -> None:
        """All that follows one opening, its closing included."""
        dialect, is_parallel = self._dialect, self._request.is_parallel
        in_list = "BEGIN call (NEXT call)* END" if is_parallel else "BEGIN call END"
        if dialect.begins_list or (dialect.may_be_list and not dialect.opens_anywhere):
            self.rules |= {
                "BEGIN": rf"/{_BREAK}\[/",
                "NEXT": f"/{_BREAK},/",
                "END": rf"/{_BREAK}\]/",
            }
            calls = in_list if dialect.begins_list else f"call | {in_list}"
        elif dialect.separator and is_parallel:
            self.rules["PART"] = f"/{_BREAK}{_escape(dialect.separator)}/"
            calls = "call (PART call)*"
        else:
            calls = "call"
        self.rules["calls"] = f"{calls} BREAK? {self._mark(dialect.closing)}" if dialect.closing else calls

    def _write_called(self) -> None:
        """A whole answer that consists of calls."""
        dialect = self._dialect
        if dialect.opens_anywhere:
            opened = f"{self._mark(dialect.opening)} calls"
            self.rules["called"] = f"{opened} (BREAK? {opened})*" if self._request.is_parallel else opened
        elif dialect.opening in self._mark_ids:
            self.rules["called"] = f"({self._mark(dialect.opening)})? calls"
        else:
            self.rules["called"] = "calls"

    def _write_auto(self) -> None:
        dialect = self._dialect
        if not dialect.opens_anywhere:
            names = "|".join(_escape(tool.name) for tool in self._request.tools)
            list_start = rf"(\[{_SPACE})?" if dialect.may_be_list else ""
            call_start = rf'{_SPACE}{list_start}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"({names})"'
            self.rules["start"] = "OTHER | called"
            self.rules["OTHER"] = f"TEXT & ~/{call_start}(?s:.*)/"
            return
        is_token = dialect.opening in self._mark_ids
        self.rules["open" if is_token else "open[lazy]"] = f"TEXT {self._mark(dialect.opening)}"
        self.rules["start"] = "(open calls)* TEXT" if self._request.is_parallel else "TEXT | open calls"

    def _mark(self, text: str) -> str:
        token_id = self._mark_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _embed_content(content: GrammarSpec) -> str:
    from kvpilot_engine.text.grammar_source import embed_schema

    schema = json.loads(content.text) if content.kind is GrammarKind.JSON_SCHEMA else _ANY_OBJECT
    return embed_schema(schema, is_lenient=False)


def _escape(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
