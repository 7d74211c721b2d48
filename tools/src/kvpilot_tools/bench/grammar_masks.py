"""What following a grammar costs on the real vocabulary: compiling, and the mask before each token.

    python -m kvpilot_tools.bench.grammar_masks

Processor time of the one thread, so that a busy machine matters little. The model is random: every allowed token is as
likely, which leads to odd states more often than a real one would. Not for the cost of applying a mask to logits, which
is the sampler's.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator

import numpy as np

from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError, ModelExecutionError
from kvpilot_engine.text.constraints import GrammarCompiler
from kvpilot_engine.text.model_text import load_tokenizer
from kvpilot_engine.text.tool_definitions import parse_tools
from kvpilot_engine.text.tool_dialects import HERMES, LLAMA3_JSON
from kvpilot_engine.text.tool_grammar import build_tool_grammar
from kvpilot_tools.bench.peer_layout import benchmark_model

TOKENS_PER_OUTPUT = 200
OUTPUTS = 5
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def _list_grammars() -> Iterator[tuple[str, GrammarSpec]]:
    yield "json_object", GrammarSpec(GrammarKind.JSON_OBJECT)
    yield "json_schema, 4 fields", GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_PERSON))
    wide = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(300)}}
    yield "json_schema, 300 fields", GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(wide))
    yield "regex", GrammarSpec(GrammarKind.REGEX, r"(\d{1,3}\.){3}\d{1,3}( [a-z]+)*")
    definitions = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": _PERSON, "strict": True}}
        for i in range(20)
    ]
    for dialect in (HERMES, LLAMA3_JSON):
        for choice in ("auto", "required"):
            request = parse_tools(definitions, choice)
            grammar = None if request is None else build_tool_grammar(request, dialect, {})
            if grammar is None:
                raise SystemExit("the tools of this benchmark can't be enforced")
            yield f"20 tools, {dialect.name}, {choice}", grammar
    yield "hostile regex", GrammarSpec(GrammarKind.REGEX, ".*a.{30}b.*c.{30}d.*")
    yield "hostile Lark", GrammarSpec(GrammarKind.LARK, 'start: e\ne: e e | e e e | "a" | "b" |')


def _follow(compiler: GrammarCompiler, grammar: GrammarSpec, generator: random.Random) -> tuple[list[float], str]:
    """Microseconds of each mask, and how it ended."""
    constraint = compiler.compile(grammar)
    times_us: list[float] = []
    try:
        while len(times_us) < TOKENS_PER_OUTPUT and not constraint.is_complete:
            started_at = time.thread_time()
            mask = constraint.compute_mask()
            times_us.append((time.thread_time() - started_at) * 1e6)
            allowed = np.flatnonzero(np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little"))
            constraint.accept(TokenId(int(generator.choice(list(allowed[:: max(1, len(allowed) // 512)])))))
    except ModelExecutionError as error:
        return times_us, str(error)[:60]
    return times_us, ""


def main() -> None:
    tokenizer = load_tokenizer(benchmark_model())
    compiler = GrammarCompiler(lambda: tokenizer, num_logits=tokenizer.vocab_size)
    started_at = time.thread_time()
    compiler.compile(GrammarSpec(GrammarKind.REGEX, "a"))
    print(f"vocabulary of {tokenizer.vocab_size} tokens prepared in {time.thread_time() - started_at:.2f} s")
    print(f"{'grammar':32} {'compile ms':>10} {'again ms':>9} {'mask us: median':>16} {'p99':>7} {'max':>7}  end")
    for name, grammar in _list_grammars():
        started_at = time.thread_time()
        try:
            compiler.compile(grammar)
        except InvalidRequestError as error:
            print(f"{name:32} refused: {error}")
            continue
        compiled_at = time.thread_time()
        compiler.compile(grammar)
        again_s = time.thread_time() - compiled_at
        runs = [_follow(compiler, grammar, random.Random(seed)) for seed in range(OUTPUTS)]  # noqa: S311
        times_us = sorted(us for run, _ in runs for us in run)
        print(
            f"{name:32} {(compiled_at - started_at) * 1000:10.1f} {again_s * 1000:9.2f} "
            f"{statistics.median(times_us):16.0f} {times_us[len(times_us) * 99 // 100]:7.0f} {times_us[-1]:7.0f}  "
            + next((end for _, end in runs if end), "")
        )


if __name__ == "__main__":
    main()
