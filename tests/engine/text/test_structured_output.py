"""From request fields to a grammar: every spelling, exactly one of them, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError, ModelExecutionError
from kvpilot_engine.text.constraints import GrammarCompiler
from kvpilot_engine.text.structured_output import MAX_GBNF_RULES, MAX_GRAMMAR_CHARS, build_grammar
from kvpilot_engine.text.testing import make_tokenizer

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
GBNF = 'root ::= greeting " " [a-z]+\ngreeting ::= "hi" | "ho"'
LARK = 'start: ("hi" | "ho") " " /[a-z]+/'


def json_schema_format(**changed: object) -> dict[str, object]:
    described = {"name": "answer", "schema": SCHEMA, "strict": True} | changed
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def allows(grammar: GrammarSpec | None, text: str) -> bool:
    """True when the whole text matches."""
    assert grammar is not None
    tokenizer = make_tokenizer()
    constraint = GrammarCompiler(lambda: tokenizer, num_logits=tokenizer.vocab_size).compile(grammar)
    assert tokenizer.policy.eos_id is not None
    try:
        for token in [*text.encode("utf-8"), tokenizer.policy.eos_id]:
            constraint.accept(TokenId(token))
    except ModelExecutionError:
        return False
    return constraint.is_complete


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
    ],
)
def test_fields_that_ask_for_nothing_leave_the_output_free(fields: dict[str, object]) -> None:
    assert build_grammar(fields) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec(GrammarKind.JSON_OBJECT)),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec(GrammarKind.JSON_OBJECT)),
        (json_schema_format(), SCHEMA_GRAMMAR),
        (json_schema_format(strict=None), SCHEMA_GRAMMAR),
        (json_schema_format(schema=None), GrammarSpec(GrammarKind.JSON_OBJECT)),
        ({"guided_json": SCHEMA}, SCHEMA_GRAMMAR),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA_GRAMMAR),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_GRAMMAR),
        ({"guided_json": True}, GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")),
        ({"guided_regex": "a+b"}, GrammarSpec(GrammarKind.REGEX, "a+b")),
        ({"structured_outputs": {"regex": "a+b"}}, GrammarSpec(GrammarKind.REGEX, "a+b")),
        ({"guided_grammar": LARK}, GrammarSpec(GrammarKind.LARK, LARK)),
    ],
)
def test_every_spelling_becomes_its_grammar(fields: dict[str, object], expected: GrammarSpec) -> None:
    assert build_grammar(fields) == expected


@pytest.mark.parametrize("spelling", ["guided_choice", "structured_outputs"])
def test_a_choice_is_one_of_its_strings_whatever_they_hold(spelling: str) -> None:
    choices = ["yes", 'a "quoted" \\ one\n', "<tool>", "žluťoučký 😀", "a|b"]
    grammar = build_grammar({spelling: choices if spelling == "guided_choice" else {"choice": choices}})
    assert all(allows(grammar, choice) for choice in choices)
    assert not any(allows(grammar, text) for text in ("", "ye", "yes!", "a", "yesyes"))


@pytest.mark.parametrize("text", [GBNF, LARK])
def test_a_grammar_may_be_gbnf_or_lark(text: str) -> None:
    grammar = build_grammar({"guided_grammar": text})
    assert allows(grammar, "ho abc")
    assert not allows(grammar, "hu abc")
    assert not allows(grammar, "hi ")


def test_options_of_the_library_inside_a_schema_have_no_effect() -> None:
    assert build_grammar({"guided_json": {**SCHEMA, "x-guidance": {"lenient": True}}}) == SCHEMA_GRAMMAR


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": 5}, "response_format.type", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "'structural_tag'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object with name"),
        (json_schema_format(name="a b"), "response_format.json_schema.name", "'a b'"),
        (json_schema_format(name=None), "response_format.json_schema.name", "1 to 64"),
        (json_schema_format(strict=1), "response_format.json_schema.strict", "true or false"),
        (json_schema_format(schema=[]), "response_format.json_schema.schema", "must be a JSON schema"),
        (json_schema_format(schema={"type": "any"}), "response_format", "Invalid type: any"),
        (json_schema_format(schema={"if": {}}), "response_format", 'Unimplemented keys: ["if"]'),
        (json_schema_format(strict=False, schema={"not": {}}), "response_format", "Unimplemented keys"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": False}, "guided_json", "must be a JSON schema"),
        ({"guided_json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "guided_json", "Unsatisfiable"),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, "guided_json", "not present"),
        ({"guided_json": '"\\ud800"'}, "guided_json", "must be a JSON schema"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "can't be followed"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_regex": 3}, "guided_regex", "must be a string"),
        ({"guided_regex": "[a-"}, "guided_regex", "unclosed character class"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_choice": []}, "guided_choice", "one or more strings"),
        ({"guided_choice": "abc"}, "guided_choice", "list"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        ({"guided_grammar": "hello"}, "guided_grammar", "neither Lark"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar", "'nothing' not found"),
        ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "nested too deeply"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "can't be followed"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build_grammar(fields)
    assert refusal.value.param == param
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "second",
    [{"guided_json": SCHEMA}, {"structured_outputs": {"choice": ["a"]}}, {"guided_grammar": LARK}],
)
def test_two_grammars_are_refused_naming_both(second: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"response_format and {next(iter(second))} are both set"):
        build_grammar(json_schema_format() | second)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
        {"guided_json": {"const": "a" * MAX_GRAMMAR_CHARS}},
        {"guided_choice": ["a" * MAX_GRAMMAR_CHARS]},
        {"guided_grammar": f'start: "{"a" * MAX_GRAMMAR_CHARS}"'},
    ],
)
def test_an_oversized_grammar_is_refused_with_its_size_and_the_limit(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"has \d+ characters; at most {MAX_GRAMMAR_CHARS}"):
        build_grammar(fields)


def test_gbnf_with_too_many_rules_is_refused_before_it_is_read() -> None:
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(MAX_GBNF_RULES))
    with pytest.raises(InvalidRequestError, match=f"has {MAX_GBNF_RULES + 1} GBNF rules; at most {MAX_GBNF_RULES}"):
        build_grammar({"guided_grammar": f"root ::= r0\n{rules}"})


def test_a_schema_nested_past_every_stack_is_refused() -> None:
    nested: dict[str, Any] = {"type": "null"}
    for _ in range(900):
        nested = {"type": "array", "items": nested}
    with pytest.raises(InvalidRequestError) as refusal:
        build_grammar({"guided_json": nested})
    assert refusal.value.param == "guided_json"


def test_a_schema_whose_compilation_costs_too_much_is_refused() -> None:
    stamped = {"at": {"type": "string", "format": "date-time"}, "from": {"type": "string", "format": "uri"}}
    events = [
        {"type": "object", "properties": {"kind": {"const": f"k{i}"}, **stamped}, "required": ["kind"]}
        for i in range(300)
    ]
    with pytest.raises(InvalidRequestError, match="too big"):
        build_grammar({"guided_json": {"anyOf": events}})
