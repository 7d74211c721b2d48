"""What a chat request asks of the form of its answers, in one place: the grammar, the tools to show, how to read calls.

    plan = plan_output(fields, model_text)                        on a worker thread
    model_text.encode_chat(messages, tools=plan.template_tools)
    GenerationRequest(grammar=plan.grammar, …)
    OutputText(…, skip_specials=plan.skips_specials)
    parser = plan.new_parser()                                   one per choice, or None: all is content

Not here: the shapes of the API's answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.structured_output import GRAMMAR_FIELDS, build_grammar
from kvpilot_engine.text.tool_definitions import ToolMode, ToolRequest, parse_tools
from kvpilot_engine.text.tool_dialects import ToolDialect, find_dialect
from kvpilot_engine.text.tool_grammar import build_tool_grammar
from kvpilot_engine.text.tool_parser import ToolParser

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
OUTPUT_FIELDS = (*GRAMMAR_FIELDS, *TOOL_FIELDS)
"""The fields of a body that this module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    grammar: GrammarSpec | None = None
    tools: ToolRequest | None = None
    dialect: ToolDialect | None = None
    """None exactly when there are no tools to call."""
    skips_specials: bool = True
    """False: the marks around calls are control tokens, which must be in the text for the parser to see."""

    @property
    def template_tools(self) -> list[object] | None:
        """What the chat template shows the model."""
        return None if self.tools is None else self.tools.definitions

    def new_parser(self) -> ToolParser | None:
        """A parser for one choice; None: there are no calls in its output."""
        if self.tools is None or self.dialect is None:
            return None
        return ToolParser(
            self.dialect,
            (tool.name for tool in self.tools.tools),
            is_constrained=self.grammar is not None,
            is_required=self.tools.mode is ToolMode.REQUIRED,
        )


FREE_OUTPUT = OutputPlan()


def plan_output(fields: Mapping[str, object], text: ModelText) -> OutputPlan:
    """Read OUTPUT_FIELDS of a chat body (absent or None: not set). Raises InvalidRequestError. Slow: 0.1 s at most."""
    tools = parse_tools(*(fields.get(name) for name in TOOL_FIELDS))
    content = build_grammar(fields)
    if tools is None:
        return OutputPlan(grammar=content) if content is not None else FREE_OUTPUT
    if text.chat_template is None:
        raise InvalidRequestError("the model has no chat template to show it tools", param="tools")
    text.chat_template.require_tool_support()
    dialect = find_dialect(text.tool_call_parser, text.chat_template.source)
    mark_ids = {mark: i for mark in dialect.marks if (i := text.tokenizer.special_id(mark)) is not None}
    if content is not None and tools.mode is ToolMode.AUTO:
        _require_combinable(content, dialect, fields)
    return OutputPlan(
        grammar=build_tool_grammar(tools, dialect, mark_ids, content),
        tools=tools,
        dialect=dialect,
        skips_specials=not mark_ids,
    )


def _require_combinable(content: GrammarSpec, dialect: ToolDialect, fields: Mapping[str, object]) -> None:
    """Text in a given form and calls can share an answer when it is JSON and calls have an opening of their own."""
    name = next(name for name in GRAMMAR_FIELDS if fields.get(name) is not None)
    if content.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        raise InvalidRequestError(
            f'{name} and tools can be combined for JSON only; set tool_choice to "none" or "required"', param=name
        )
    if not dialect.opens_anywhere:
        raise InvalidRequestError(
            f"{name} and tools can't be combined for this model, whose calls ({dialect.name}) look like text; "
            'set tool_choice to "none" or "required"',
            param=name,
        )
