"""Whatever JSON a body holds in the fields of output_plan, the answer is a plan or a refusal that names a field."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.errors import InvalidRequestError, ModelExecutionError
from kvpilot_engine.text.constraints import GrammarCompiler
from kvpilot_engine.text.output_plan import OUTPUT_FIELDS, OutputPlan, plan_output
from kvpilot_engine.text.testing import TOOL_TEMPLATES, make_model_text, make_tokenizer, make_tool, sample_randomly

TEXT = make_model_text(TOOL_TEMPLATES["hermes"], tokenizer=make_tokenizer(merged=[b"<tool_call>", b'{"name']))
COMPILER = GrammarCompiler(lambda: TEXT.tokenizer, num_logits=TEXT.tokenizer.vocab_size)
WORDS = st.sampled_from(
    [
        *("type", "function", "name", "parameters", "strict", "json_schema", "schema", "json_object", "text", "auto"),
        *("required", "none", "json", "regex", "choice", "grammar", "object", "string", "integer", "array", "number"),
        *("properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "#", "#/$defs/a"),
        *("pattern", "minLength", "maximum", "additionalProperties", "x-guidance", "", "a", "a+", "(", "[^x]", "é😀"),
        *("start: a", 'start: "a"', "root ::= a", 'root ::= "a"*', "start: <[5]>", "start: @x", "%json {}", "\x00"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
SCHEMAS = st.dictionaries(WORDS, JSON, max_size=5)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "response_format": st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries({"name": st.just("a"), "schema": SCHEMAS}),
        }
    ),
    "structured_outputs": st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar"]), JSON, max_size=2),
    "guided_json": SCHEMAS,
    "tools": st.lists(st.builds(make_tool, st.sampled_from(["a", "b"]), SCHEMAS, strict=st.booleans()), max_size=2),
    "tool_choice": st.sampled_from(["auto", "required", "none"]),
}
FIELDS = st.fixed_dictionaries({}, optional={name: LIKELY.get(name, JSON) | JSON for name in OUTPUT_FIELDS})


def plan_or_refuse(fields: dict[str, Any]) -> OutputPlan | str:
    """The plan, or the field that a refusal names."""
    try:
        return plan_output(fields, TEXT)
    except InvalidRequestError as error:
        return (error.param or "").partition(".")[0].partition("[")[0]


@given(FIELDS)
def test_any_json_is_planned_or_refused_by_name(fields: dict[str, Any]) -> None:
    plan = plan_or_refuse(fields)
    if isinstance(plan, str):
        assert plan in OUTPUT_FIELDS
        return
    assert (plan.new_parser() is None) == (plan.template_tools is None)
    if plan.grammar is not None:
        with contextlib.suppress(InvalidRequestError, ModelExecutionError):
            sample_randomly(COMPILER.compile(plan.grammar), seed=0, max_tokens=20)
