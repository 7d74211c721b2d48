"""A GrammarSpec as llguidance reads it, and what a client's grammar may cost.

The door (`validate_grammar`) and the engine child (`constraints`) read the same source under the same limits, so what
passed the door compiles there too. Measured on one core, the lexer's limits amount to at most about 0.1 s to compile a
grammar and 10 ms for one mask; usual schemas take 1 ms and 0.005 ms.

Imported on first use only: a server that nobody asks for structured output never loads llguidance.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.errors import InvalidRequestError

WHITESPACE = r"[\x20]|\r?\n[\x20\t]{0,40}"
"""Between the parts of a JSON value: nothing, a space, or a new line and its indentation. Free white space lets small
models write blanks until max_tokens."""
MAX_MESSAGE_CHARS = 300
MAX_REMEMBERED = 64


def new_limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=150_000,
        step_lexer_fuel=100_000,  # text beside 128 tools of a family without marks needs 50,000
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # an error must not carry a client's schema and output into logs
    )


def build_source(grammar: GrammarSpec) -> str:
    """The grammar as LLMatcher takes it; not checked yet."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = '{"type": "object"}' if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": False})


def embed_schema(schema: dict[str, Any], *, is_lenient: bool) -> str:
    """A `%json` expression for a Lark grammar. Lenient: keywords that can't be enforced are left unenforced."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": is_lenient, "coerce_one_of": is_lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def validate_grammar(grammar: GrammarSpec, *, param: str) -> None:
    """Raise InvalidRequestError, naming `param`, for a grammar that can't be followed. Slow (0.1 s at most)."""
    problem = find_problem(grammar)
    if problem:
        raise InvalidRequestError(f"{param} can't be followed: {problem}", param=param)


@lru_cache(maxsize=MAX_REMEMBERED)
def find_problem(grammar: GrammarSpec) -> str:
    """Why a grammar can't be followed; empty when it can. Remembered: agents send the same tools with every turn."""
    try:
        is_error, problems = LLMatcher.validate_grammar_with_warnings(build_source(grammar), limits=new_limits())
    except ValueError as error:
        is_error, problems = True, [str(error)]
    return shorten("; ".join(problems)) if is_error else ""


def shorten(problem: str) -> str:
    """One line of a message that may quote the whole grammar."""
    words = " ".join(problem.split())
    return words if len(words) <= MAX_MESSAGE_CHARS else words[:MAX_MESSAGE_CHARS] + "…"
