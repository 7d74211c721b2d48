"""Masks over a vocabulary: what a grammar allows, when it ends, and what a hostile one may cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import GrammarTooComplexError, InvalidRequestError, ModelExecutionError
from kvpilot_engine.text.constraints import MASK_BUDGET_S, GrammarCompiler
from kvpilot_engine.text.model_text import ModelText
from kvpilot_engine.text.testing import make_tokenizer, read_mask, sample_randomly
from kvpilot_engine.text.tokenizer import Tokenizer

MERGED = (b'{"', b'":', b'", "', b"true", b"null", b"  ", b"\n ", b"name", b"abc", b"</", b"12")
NUM_LOGITS = 320
"""More than the vocabulary, as in models whose embedding is padded."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(merged=MERGED)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, num_logits=NUM_LOGITS)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def end_token(tokenizer: Tokenizer) -> TokenId:
    assert tokenizer.policy.eos_id is not None
    return tokenizer.policy.eos_id


def test_the_mask_has_a_bit_for_each_logit_and_none_past_the_vocabulary(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(regex(r"(?s:.*)"))
    mask = constraint.compute_mask()
    assert isinstance(mask, np.ndarray)
    assert (mask.dtype, mask.shape) == (np.uint32, (NUM_LOGITS // 32,))
    tokenizer = make_tokenizer(merged=MERGED)
    assert max(read_mask(constraint)) < tokenizer.vocab_size


def test_logits_narrower_than_the_vocabulary_are_never_overrun(tokenizer: Tokenizer) -> None:
    wide = make_tokenizer(merged=MERGED, user_defined_texts=["<tool>"])
    narrow = GrammarCompiler(lambda: wide, num_logits=wide.vocab_size - 1)
    allowed = read_mask(narrow.compile(regex("<tool>")))
    assert allowed == [TokenId(ord("<"))]


def test_an_end_token_is_allowed_exactly_when_the_grammar_may_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    end = end_token(tokenizer)
    constraint = compiler.compile(regex("xy?"))
    assert read_mask(constraint) == [ord("x")]
    constraint.accept(TokenId(ord("x")))
    assert sorted(read_mask(constraint)) == sorted([TokenId(ord("y")), end])
    assert not constraint.is_complete
    constraint.accept(TokenId(ord("y")))
    assert constraint.is_complete
    assert read_mask(constraint) == [end]


def test_an_end_token_completes_a_grammar_that_might_go_on(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(regex("a*"))
    constraint.accept(end_token(tokenizer))
    assert constraint.is_complete


def test_an_end_token_after_the_end_is_accepted_again(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(regex("a"))
    constraint.accept(TokenId(ord("a")))
    for _ in range(2):
        constraint.accept(end_token(tokenizer))
        assert constraint.is_complete


@pytest.mark.parametrize("token", [ord("x"), "end", 319])
def test_a_token_that_the_mask_forbids_is_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer, token: int | str
) -> None:
    constraint = compiler.compile(regex("ab"))
    with pytest.raises(ModelExecutionError, match="the grammar does not allow token"):
        constraint.accept(TokenId(token) if isinstance(token, int) else end_token(tokenizer))


def test_computing_a_mask_changes_nothing(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(schema({"type": "string"}))
    first, second = constraint.compute_mask(), constraint.compute_mask()
    assert np.array_equal(np.asarray(first), np.asarray(second))


def test_control_tokens_are_never_allowed_as_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(regex(r"(?s:.*)"))
    assert set(read_mask(constraint)) & tokenizer.special_ids == {end_token(tokenizer)}


def test_sequences_with_the_same_grammar_do_not_move_each_other(compiler: GrammarCompiler) -> None:
    one, other = compiler.compile(regex("xy")), compiler.compile(regex("xy"))
    one.accept(TokenId(ord("x")))
    assert read_mask(other) == [ord("x")]
    assert read_mask(one) == [ord("y")]


SCHEMAS: dict[str, Any] = {
    "integer": {"type": "integer", "minimum": -5, "maximum": 5000},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "enum": {"enum": ["red", "grün", 3, None, {"a": [1]}]},
    "string bounds": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": "date"}, {"format": "uuid"}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"const": 1}}, "required": ["b"]},
    "anyOf": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "tagged oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "x"}, "v": {"type": "null"}}, "required": ["t", "v"]},
            {"type": "object", "properties": {"t": {"const": "y"}}, "required": ["t"]},
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "recursive": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}]}}}},
        "$ref": "#/$defs/node",
    },
    "minProperties": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
def test_even_a_random_model_writes_json_that_its_schema_accepts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, seed: int
) -> None:
    constraint = compiler.compile(schema(SCHEMAS[name]))
    output = sample_randomly(constraint, seed=seed, max_tokens=20_000)
    assert constraint.is_complete
    jsonschema.validate(json.loads(tokenizer.decode(output, skip_specials=True)), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(3))
def test_even_a_random_model_writes_a_json_object(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    constraint = compiler.compile(GrammarSpec(GrammarKind.JSON_OBJECT))
    output = sample_randomly(constraint, seed=seed, max_tokens=20_000)
    assert isinstance(json.loads(tokenizer.decode(output, skip_specials=True)), dict)


@pytest.mark.parametrize("expression", [r"[a-f0-9]{8}", r"(yes|no|maybe)!?", r"\d{1,3}(\.\d{1,3}){3}", "č+😀"])
def test_even_a_random_model_matches_a_regular_expression(
    compiler: GrammarCompiler, tokenizer: Tokenizer, expression: str
) -> None:
    constraint = compiler.compile(regex(expression))
    output = sample_randomly(constraint, seed=1, max_tokens=2000)
    assert re.fullmatch(expression, tokenizer.decode(output, skip_specials=True))


def test_white_space_between_json_parts_is_bounded(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(schema({"type": "array", "items": {"type": "null"}, "minItems": 1}))
    constraint.accept(TokenId(ord("[")))
    constraint.accept(TokenId(ord(" ")))
    assert not {ord(" "), ord("\n"), ord("\t")} & set(read_mask(constraint))


HOSTILE: dict[str, GrammarSpec] = {
    "many lexer states": regex(".*a.{30}b.*c.{30}d.*"),
    "a long count": regex("(a|b)*a(a|b){5000}"),
    "counts of counts": regex("(?:(?:(?:.{100}){100}){100})"),
    "nested repetition": regex("(((a+)+)+)+b"),
    "ambiguity": GrammarSpec(GrammarKind.LARK, 'start: e\ne: e e | e e e | "a" | "b" |'),
    "a huge array": schema({"type": "array", "minItems": 1_000_000, "items": {"type": "array", "minItems": 1_000_000}}),
    "a tower of references": schema(
        {
            "$defs": {
                f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(20)
            }
            | {"d20": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "a product of alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for i in range(8)]} for j in range(8)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_answer_or_an_error(compiler: GrammarCompiler, name: str) -> None:
    """Bounded work: it may be refused, follow, or become too complex; it never takes the engine thread with it."""
    try:
        constraint = compiler.compile(HOSTILE[name])
        sample_randomly(constraint, seed=0, max_tokens=400)
    except (InvalidRequestError, ModelExecutionError) as error:
        assert len(str(error)) < 500  # noqa: PT017  either way is right; what matters is that it ends


def test_a_grammar_that_becomes_too_complex_is_the_requests_fault(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(GrammarSpec(GrammarKind.LARK, 'start: "a" start'))
    with pytest.raises(GrammarTooComplexError, match="became too complex to follow"):
        sample_randomly(constraint, seed=0, max_tokens=2000)


@pytest.mark.parametrize("expression", [r"[^\s\S]", r"a[^\s\S]"])
def test_a_grammar_that_nothing_matches_is_refused(compiler: GrammarCompiler, expression: str) -> None:
    with pytest.raises(InvalidRequestError, match="can't be followed"):
        compiler.compile(regex(expression))


def ticking(step_s: float) -> Callable[[], float]:
    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += step_s

    return ticks().__next__


def test_a_sequence_whose_masks_cost_too_much_ends_with_an_error(tokenizer: Tokenizer) -> None:
    slow = GrammarCompiler(lambda: tokenizer, num_logits=NUM_LOGITS, thread_time=ticking(MASK_BUDGET_S / 10))
    with pytest.raises(GrammarTooComplexError, match=r"costs more than 0\.5 s and 1 ms a token"):
        sample_randomly(slow.compile(regex("a{100}")), seed=0, max_tokens=100)


def test_a_sequence_may_be_long_when_its_masks_are_cheap(tokenizer: Tokenizer) -> None:
    cheap = GrammarCompiler(lambda: tokenizer, num_logits=NUM_LOGITS, thread_time=ticking(0.0009))
    assert len(sample_randomly(cheap.compile(regex("a{1500}")), seed=0, max_tokens=5000)) == 1500


def test_compiled_grammars_are_kept_up_to_a_number_and_a_size(tokenizer: Tokenizer) -> None:
    bounded = GrammarCompiler(lambda: tokenizer, num_logits=NUM_LOGITS, max_cached_grammars=3, max_cached_chars=100)
    for text in ("a", "b", "a", "c", "d"):
        bounded.compile(regex(text))
    assert bounded.num_cached_grammars == 3
    bounded.compile(regex("x" * 99))
    assert bounded.num_cached_grammars == 2
    bounded.compile(regex("y" * 200))
    assert bounded.num_cached_grammars == 1


def test_the_tokenizer_is_loaded_once_and_not_before_it_is_needed(tokenizer: Tokenizer) -> None:
    loads: list[Tokenizer] = []

    def load() -> Tokenizer:
        loads.append(tokenizer)
        return tokenizer

    lazy = GrammarCompiler(load, num_logits=NUM_LOGITS)
    assert not loads
    lazy.compile(regex("a"))
    lazy.compile(regex("b"))
    assert len(loads) == 1


def test_a_grammar_that_can_not_be_compiled_is_the_requests_fault(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="the grammar can't be followed"):
        compiler.compile(regex("(?=a)"))


def test_a_model_without_an_end_token_follows_no_grammar() -> None:
    endless = make_tokenizer(control_texts=["<|bos|>"])
    with pytest.raises(InvalidRequestError, match="name no end token"):
        GrammarCompiler(lambda: endless, num_logits=NUM_LOGITS).compile(regex("a"))


@pytest.mark.model
def test_forced_text_gets_the_models_usual_tokens(smollm2_text: ModelText) -> None:
    tokenizer = smollm2_text.tokenizer
    constraint = GrammarCompiler(lambda: tokenizer, num_logits=tokenizer.vocab_size).compile(regex("temperature today"))
    usual = tokenizer.encode("temperature today", specials_as_text=True)
    for token in usual:
        assert token in read_mask(constraint)
        constraint.accept(token)
    assert constraint.is_complete
