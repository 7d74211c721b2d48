"""Grammar, template and parser of one request together: what the grammar lets a model write, the parser reads back."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from kvpilot_engine.core.grammar import GrammarKind
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError, ModelExecutionError
from kvpilot_engine.text.constraints import GrammarCompiler
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.output_plan import OutputPlan, plan_output
from kvpilot_engine.text.output_text import OutputText
from kvpilot_engine.text.testing import (
    CONTROL_TEXTS,
    TOOL_CONTROL_TEXTS,
    TOOL_TEMPLATES,
    make_model_text,
    make_tokenizer,
    make_tool,
    read_mask,
    sample_randomly,
)
from kvpilot_engine.text.tool_definitions import MAX_TOOLS
from kvpilot_engine.text.tool_dialects import DIALECTS, ToolDialect

MERGED = (b'{"', b'"name', b'": "', b"arguments", b"parameters", b"get_weather", b"<tool_call>", b"</tool", b"\n ")
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "a.b-c": {
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [make_tool(name, parameters) for name, parameters in PARAMETERS.items()]
USER = [{"role": "user", "content": "Weather?"}]


def make_text(dialect: str, *, has_control_marks: bool) -> ModelText:
    control_texts = TOOL_CONTROL_TEXTS if has_control_marks else CONTROL_TEXTS
    return make_model_text(
        TOOL_TEMPLATES[dialect], tokenizer=make_tokenizer(merged=MERGED, control_texts=control_texts)
    )


@pytest.fixture(params=sorted(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> ToolDialect:
    return DIALECTS[str(request.param)]


@pytest.fixture(params=[False, True], ids=["text marks", "control marks"])
def text(request: pytest.FixtureRequest, dialect: ToolDialect) -> ModelText:
    return make_text(dialect.name, has_control_marks=bool(request.param))


def read_output(plan: OutputPlan, text: ModelText, ids: list[TokenId]) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and the finish reason of an output that ended by itself, streamed token by token."""
    output = OutputText(text.tokenizer, skip_specials=plan.skips_specials)
    parser = plan.new_parser()
    assert parser is not None
    end_ids = text.end_token_ids
    content = ""
    calls: list[tuple[str, str]] = []
    deltas = [parser.push(output.push([token]).text) for token in ids if token not in end_ids]
    deltas += [parser.push(output.finish().text), parser.finish()]
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append((call.name, call.arguments))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls, parser.map_finish_reason("stop")


def write(plan: OutputPlan, text: ModelText, ids: list[TokenId], *, max_tokens: int = 3000) -> list[TokenId]:
    """Begin an output with `ids`, which the grammar must allow, and go on at random."""
    assert plan.grammar is not None
    constraint = GrammarCompiler(lambda: text.tokenizer, num_logits=text.tokenizer.vocab_size).compile(plan.grammar)
    for token in ids:
        constraint.accept(token)
    return ids + sample_randomly(constraint, seed=len(ids), max_tokens=max_tokens)


def encode(text: ModelText, written: str) -> list[TokenId]:
    """As a model would write it: marks as control tokens where there are such."""
    return text.tokenizer.encode(written, specials_as_text=False)


def begin_call(dialect: ToolDialect, name: str) -> str:
    if dialect.arguments_mark:
        return f"{dialect.opening}{name}{dialect.arguments_mark}"
    return f'{dialect.opening}{"[" * dialect.begins_list}{{"name": "{name}", "{dialect.arguments_key}": '


@pytest.mark.parametrize("choice", ["required", "a.b-c"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_forced_call_is_valid_whatever_the_model_wants(
    dialect: ToolDialect, text: ModelText, choice: str, is_parallel: bool
) -> None:
    tool_choice = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    plan = plan_output({"tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": is_parallel}, text)
    assert plan.dialect is dialect
    content, calls, reason = read_output(plan, text, write(plan, text, []))
    assert content == ""
    assert reason == "tool_calls"
    if choice != "required" or not is_parallel:
        assert len(calls) == 1
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])
        assert choice in ("required", name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_call_that_the_model_begins_can_only_become_valid(dialect: ToolDialect, text: ModelText, name: str) -> None:
    plan = plan_output({"tools": TOOLS, "parallel_tool_calls": False}, text)
    if dialect.opens_anywhere:
        written = f"Let me look. {begin_call(dialect, name)}"
    else:
        written = begin_call(dialect, name).removeprefix(dialect.opening)
    content, calls, reason = read_output(plan, text, write(plan, text, encode(text, written)))
    assert content == ("Let me look." if dialect.opens_anywhere else "")
    assert reason == "tool_calls"
    ((called, arguments),) = calls
    assert called == name
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def test_an_answer_may_be_text_when_nothing_is_forced(text: ModelText) -> None:
    plan = plan_output({"tools": TOOLS}, text)
    for answer in ("Hi <b>{x}</b> [1] ", '{"name": "Ann", "age": 3}'):
        assert text.tokenizer.policy.eos_id is not None
        ids = [*encode(text, answer), text.tokenizer.policy.eos_id]
        assert read_output(plan, text, write(plan, text, ids, max_tokens=0)) == (answer, [], "stop")


def test_an_opening_leaves_no_way_but_a_call(dialect: ToolDialect, text: ModelText) -> None:
    plan = plan_output({"tools": TOOLS}, text)
    opening = dialect.opening if dialect.opens_anywhere else '{"name": "now"'
    unknown = "rm" if dialect.arguments_mark else '{"name": "rm"' if dialect.opens_anywhere else ': "x"'
    with pytest.raises(ModelExecutionError, match="does not allow"):
        write(plan, text, encode(text, opening + unknown))


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_json_answers_and_calls_can_share_an_answer_that_marks_its_calls(
    dialect: ToolDialect, text: ModelText, kind: str
) -> None:
    described = {
        "name": "a",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    }
    fields = {"tools": TOOLS, "response_format": {"type": kind, "json_schema": described}}
    if not dialect.opens_anywhere:
        with pytest.raises(InvalidRequestError, match=r"whose calls .* look like text"):
            plan_output(fields, text)
        return
    plan = plan_output(fields, text)
    answer = '{"ok": true}'
    assert text.tokenizer.policy.eos_id is not None
    content, calls, _ = read_output(plan, text, write(plan, text, encode(text, answer)))
    assert content.startswith('{"ok": true')
    assert isinstance(json.loads(content), dict)
    assert calls == []
    assert len(read_output(plan, text, write(plan, text, encode(text, begin_call(dialect, "now"))))[1]) >= 1


def test_a_regular_expression_and_tools_can_not_share_an_answer() -> None:
    text = make_text("hermes", has_control_marks=False)
    with pytest.raises(InvalidRequestError, match="guided_regex and tools can be combined for JSON only"):
        plan_output({"tools": TOOLS, "guided_regex": "a"}, text)
    assert plan_output({"tools": TOOLS, "guided_regex": "a", "tool_choice": "none"}, text).tools is None


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    plan = plan_output({"tools": TOOLS, "tool_choice": "none"}, make_model_text())
    assert plan.template_tools is None
    assert plan.new_parser() is None
    assert plan.grammar is None


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "now"}}])
def test_a_template_that_ignores_tools_is_no_way_to_call_them(choice: object) -> None:
    with pytest.raises(InvalidRequestError, match="chat template ignores tools"):
        plan_output({"tools": TOOLS, "tool_choice": choice}, make_model_text())
    with pytest.raises(InvalidRequestError, match="no chat template"):
        plan_output({"tools": TOOLS, "tool_choice": choice}, make_model_text(None))


def test_the_template_shows_the_tools_and_writes_calls_of_the_history(text: ModelText, dialect: ToolDialect) -> None:
    plan = plan_output({"tools": TOOLS}, text)
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "18"}]
    shown = text.tokenizer.decode(text.encode_chat(history, tools=plan.template_tools))
    assert '"get_weather"' in shown
    expected = begin_call(dialect, "now") + '{"zone": "CET"}'
    assert expected.removeprefix("" if dialect.opens_anywhere else dialect.opening).replace("\n", "") in shown.replace(
        "\n", ""
    )


def test_a_named_parser_wins_over_the_template() -> None:
    text = make_text("hermes", has_control_marks=False)
    named = ModelText(
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        generation_defaults=text.generation_defaults,
        tool_call_parser="llama3_json",
    )
    assert plan_output({"tools": TOOLS}, named).dialect is DIALECTS["llama3_json"]


UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}}
PARTLY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "dependentRequired": {}}


def test_a_strict_tool_is_enforced_in_full_or_refused() -> None:
    text = make_text("hermes", has_control_marks=False)
    for parameters in (UNENFORCEABLE, PARTLY):
        with pytest.raises(InvalidRequestError, match="can't be enforced") as refusal:
            plan_output({"tools": [TOOLS[0], make_tool("strict", parameters, strict=True)]}, text)
        assert refusal.value.param == "tools[1].function.parameters"


def test_another_tool_is_enforced_as_far_as_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    text = make_text("hermes", has_control_marks=False)
    partly = plan_output({"tools": [make_tool("partly", PARTLY)], "tool_choice": "required"}, text)
    assert partly.grammar is not None
    assert '"integer"' in partly.grammar.text
    loose = plan_output({"tools": [make_tool("loose", UNENFORCEABLE), TOOLS[0]], "tool_choice": "required"}, text)
    assert loose.grammar is not None
    assert "(?=a)" not in loose.grammar.text
    assert '"unit"' in loose.grammar.text
    assert "arguments of tools[0] are any JSON object" in caplog.text
    assert "(?=a)" not in caplog.text


def test_tools_too_large_to_enforce_are_checked_afterwards_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    text = make_text("hermes", has_control_marks=False)
    tools = [make_tool(f"t{i}", {"type": "object", "description": "x" * 9000}) for i in range(30)]
    plan = plan_output({"tools": tools}, text)
    assert plan.grammar is None
    assert "checked after they are written" in caplog.text
    parser = plan.new_parser()
    assert parser is not None
    assert parser.push('<tool_call>{"name": "t1", "arguments": {').calls == ()
    for choice in ("required", {"type": "function", "function": {"name": "t1"}}):
        if choice == "required":
            with pytest.raises(InvalidRequestError, match="more than 262144"):
                plan_output({"tools": tools, "tool_choice": choice}, text)
        else:
            assert plan_output({"tools": tools, "tool_choice": choice}, text).grammar is not None


@pytest.mark.parametrize("seed", range(5))
def test_random_answers_with_tools_stay_readable(dialect: ToolDialect, text: ModelText, seed: int) -> None:
    """Half of the time the model takes whatever leads towards a call."""
    plan = plan_output({"tools": TOOLS}, text)
    assert plan.grammar is not None
    constraint = GrammarCompiler(lambda: text.tokenizer, num_logits=text.tokenizer.vocab_size).compile(plan.grammar)
    wanted = set(encode(text, f'{dialect.opening}[{{"name": "now", "get_weather'))
    generator = random.Random(seed)
    ids: list[TokenId] = []
    while len(ids) < 150 and not constraint.is_complete:
        allowed = read_mask(constraint)
        liked = [token for token in allowed if token in wanted]
        ids.append(generator.choice(liked if liked and generator.random() < 0.5 else allowed))
        constraint.accept(ids[-1])
    content, calls, _ = read_output(plan, text, ids)
    assert dialect.opening == "" or not dialect.opens_anywhere or dialect.opening not in content
    for name, arguments in calls if constraint.is_complete else calls[:-1]:
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def test_content_alone_is_a_grammar_without_tools() -> None:
    plan = plan_output({"response_format": {"type": "json_object"}}, make_model_text())
    assert plan.grammar is not None
    assert plan.grammar.kind is GrammarKind.JSON_OBJECT
    assert plan.new_parser() is None


@pytest.mark.model
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "json"])
def test_as_many_tools_as_are_allowed_can_be_followed(smollm2_text: ModelText, name: str) -> None:
    stamp = {"at": {"type": "string", "format": "date-time"}, "note": {"type": "string"}}
    tools = [make_tool(f"tool_{i}", {"type": "object", "properties": {f"p{i}": {}, **stamp}}) for i in range(MAX_TOOLS)]
    text = make_model_text(TOOL_TEMPLATES[name], tokenizer=smollm2_text.tokenizer)
    plan = plan_output({"tools": tools}, text)
    assert plan.grammar is not None
    compiler = GrammarCompiler(lambda: text.tokenizer, num_logits=text.tokenizer.vocab_size)
    assert len(read_mask(compiler.compile(plan.grammar))) > 40_000
