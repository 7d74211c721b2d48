"""From the fields of a request to the grammar that its output must match.

    response_format      OpenAI's: text, json_object, json_schema {name, schema, strict}
    structured_outputs   vLLM's: exactly one of json, regex, choice, grammar, json_object
    guided_json, guided_regex, guided_choice, guided_grammar   the older names of the same

At most one of them all may be set. A schema is followed or refused, never followed in part, strict or not. A grammar is
either Lark in llguidance's dialect (it has a rule `start:`) or GBNF, llama.cpp's EBNF (a rule `root ::=`).
Slow for large schemas (`grammar_source`): called on a worker thread. Not here: tools (`tool_grammar`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.errors import InvalidRequestError

GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_GBNF_RULES = 500
"""The conversion to Lark takes time with the square of the rules: 0.1 s for these."""
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNUSED = (None, False)
"""Values of structured_outputs' further options that ask for nothing."""


def build_grammar(fields: Mapping[str, object]) -> GrammarSpec | None:
    """Read GRAMMAR_FIELDS of a request body; None when the output is free. Raises InvalidRequestError."""
    found: list[tuple[str, GrammarSpec]] = []
    for name in GRAMMAR_FIELDS:
        value = fields.get(name)
        grammar = None if value is None else _BUILDERS[name](value, name)
        if grammar is not None:
            found.append((name, grammar))
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0][0]} and {found[1][0]} are both set; an output can follow only one", param=found[1][0]
        )
    if not found:
        return None
    from kvpilot_engine.text.grammar_source import validate_grammar

    name, grammar = found[0]
    validate_grammar(grammar, param=name)
    return grammar


def _read_response_format(value: object, param: str) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(GrammarKind.JSON_OBJECT)
    if kind != "json_schema" or not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{param}.type is {kind!r:.40}; it must be text, json_object or json_schema", param=f"{param}.type"
        )
    place = f"{param}.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise InvalidRequestError(f"{place} must be an object with name and schema", param=place)
    name = described.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{place}.name is {name!r:.80}; it must be 1 to 64 letters, digits, _ or -", param=f"{place}.name"
        )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{place}.strict must be true or false", param=f"{place}.strict")
    schema = described.get("schema")
    return GrammarSpec(GrammarKind.JSON_OBJECT) if schema is None else _read_schema(schema, f"{place}.schema")


def _read_structured_outputs(value: object, param: str) -> GrammarSpec | None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param=param)
    chosen = {name: option for name, option in value.items() if option not in _UNUSED}
    if not chosen:
        return None
    unknown = sorted(chosen.keys() - _CHOICES.keys())
    if unknown:
        raise InvalidRequestError(
            f"{param}.{unknown[0]} is not supported by this server", param=f"{param}.{unknown[0]}"
        )
    if len(chosen) > 1:
        raise InvalidRequestError(f"{param} sets {' and '.join(sorted(chosen))}; set only one of them", param=param)
    ((name, option),) = chosen.items()
    return _CHOICES[name](option, f"{param}.{name}")


def _read_schema(value: object, param: str) -> GrammarSpec:
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param} must be a JSON schema, an object", param=param)
    kept = {key: item for key, item in schema.items() if key != "x-guidance"}  # options of the library are ours to set
    try:
        text = json.dumps(kept, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequestError(f"{param} is nested too deeply", param=param) from error
    return GrammarSpec(GrammarKind.JSON_SCHEMA, _bounded(text, param))


def _read_json_object(value: object, param: str) -> GrammarSpec:
    if value is not True:
        raise InvalidRequestError(f"{param} must be true or false", param=param)
    return GrammarSpec(GrammarKind.JSON_OBJECT)


def _read_regex(value: object, param: str) -> GrammarSpec:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{param} must be a string that is not empty", param=param)
    return GrammarSpec(GrammarKind.REGEX, _bounded(value, param))


def _read_choice(value: object, param: str) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequestError(f"{param} must be a list of one or more strings, none of them empty", param=param)
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in value)
    return GrammarSpec(GrammarKind.LARK, _bounded("start: " + " | ".join(quoted), param))


def _read_grammar(value: object, param: str) -> GrammarSpec:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f"{param} must be a string that is not empty", param=param)
    num_rules = _bounded(value, param).count("::=")
    if num_rules > MAX_GBNF_RULES:
        raise InvalidRequestError(
            f"{param} has {num_rules} GBNF rules; at most {MAX_GBNF_RULES} are allowed", param=param
        )
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(value)
    # The converter has no error type of its own for all it can't read.
    except Exception as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(
            f"{param} is neither Lark (with a rule start:) nor GBNF (with a rule root ::=): {reason:.200}", param=param
        ) from error
    return GrammarSpec(GrammarKind.LARK, _bounded(lark, param))


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed", param=param
        )
    return text


_Builder = Callable[[object, str], GrammarSpec | None]
_BUILDERS: dict[str, _Builder] = {
    "response_format": _read_response_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": _read_schema,
    "guided_regex": _read_regex,
    "guided_choice": _read_choice,
    "guided_grammar": _read_grammar,
}
_CHOICES: dict[str, _Builder] = {
    "json": _read_schema,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "json_object": _read_json_object,
}
