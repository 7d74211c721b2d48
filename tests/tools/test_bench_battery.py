"""Our answers to the battery against those recorded of vLLM: they differ as listed, neither more nor less."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvpilot_tools.bench.answer_shape import AnswerShape, describe_answer
from kvpilot_tools.bench.battery import (
    DOCUMENT,
    Difference,
    ask_all,
    covers,
    find_differences,
    match_rules,
    read_fixture,
    unused_rules,
    write_fixture,
)
from kvpilot_tools.bench.battery_requests import build_battery
from kvpilot_tools.bench.battery_rules import RULES, Rule
from kvpilot_tools.bench.peer_layout import benchmark_model
from kvpilot_tools.bench.server_process import start_server
from kvpilot_tools.bench.server_specs import kvpilot_spec


def describe(body: str, *, status: int = 200, stream: bool = False) -> AnswerShape:
    kind = "text/event-stream" if stream else "application/json"
    return describe_answer("/v1/completions", status, kind, body.encode())


def test_a_structure_is_paths_and_kinds_without_texts() -> None:
    one = describe('{"id": "a", "choices": [{"text": "x", "logprobs": null}, {"text": "y", "logprobs": {"a": 1}}]}')
    assert one.paths == {
        ".": "object",
        ".choices": "list",
        ".choices[]": "object",
        ".choices[].logprobs": "null|object",
        ".choices[].logprobs.a": "number",
        ".choices[].text": "string",
        ".id": "string",
    }


def test_keys_that_are_data_are_no_structure() -> None:
    one, two = (describe(f'{{"top_logprobs": [{{"{word}": -1}}]}}') for word in ("sky", "sea"))
    assert one == two


def test_a_stream_is_described_by_all_its_events_and_its_end() -> None:
    events = (
        'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
        'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
        'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n'
    )
    whole = describe(f"{events}data: [DONE]\n\n", stream=True)
    assert whole.counts == {
        "done": True, "finish_reasons": ["length"], "prompt_tokens": 2, "completion_tokens": 1,
        "usage_only_event": True,
    }  # fmt: skip
    assert whole.paths[".choices[].finish_reason"] == "null|string"
    assert describe(events, stream=True).counts["done"] is False


def test_where_statuses_differ_nothing_else_is_told() -> None:
    found = find_differences({"a": describe('{"x": 1}')}, {"a": describe('{"y": 1}', status=400)})
    assert found == [Difference("status", "status", "200", "400", "a")]


def test_what_is_below_a_missing_path_is_not_told_again() -> None:
    found = find_differences({"a": describe('{"x": {"y": {"z": 1}}}')}, {"a": describe("{}")})
    assert found == [Difference("missing", ".x", "object", "", "a")]


def test_the_first_rule_that_covers_a_difference_takes_it() -> None:
    narrow = Rule(title="n", reason="r", kinds=("type",), places=(".a[].b",), theirs="null")
    wide = Rule(title="w", reason="r", kinds=("type", "missing"))
    difference = Difference("type", ".a[].b", "null", "string", "case")
    assert covers(narrow, difference)
    assert not covers(narrow, Difference("type", ".ab.b", "null", "string", "case"))
    matched = match_rules([difference], [narrow, wide])
    assert matched[narrow] == [difference]
    assert unused_rules(matched) == ["w"]
    assert match_rules([Difference("status", "status", "1", "2", "c")], [narrow])[None]


def test_the_fixture_gives_back_what_was_written(tmp_path: Path) -> None:
    answers = {"one": describe('{"x": 1}'), "two": describe('{"x": 2}'), "three": describe("oops", status=404)}
    write_fixture(answers, tmp_path / "answers.json")
    assert read_fixture(tmp_path / "answers.json") == answers


def test_the_fixture_has_an_answer_of_vllm_to_every_request() -> None:
    recorded = read_fixture()
    assert list(recorded) == [request.name for request in build_battery()]
    assert all(answer.status for answer in recorded.values())


@pytest.mark.model
def test_our_differences_from_vllm_are_the_listed_ones(tmp_path: Path) -> None:
    # A few hundred requests through the whole server: B1, B2, B6, B7, B12, B13, B14, B17, B18, B25 are among them.
    spec = kvpilot_spec(benchmark_model(), num_threads=2)
    with start_server(spec, log=tmp_path / "engine.log") as server:
        ours = asyncio.run(ask_all(server.url, build_battery()))
        server.require_alive()
    matched = match_rules(find_differences(read_fixture(), ours), RULES)
    assert matched.pop(None, []) == []
    assert unused_rules(matched) == []


def test_every_rule_that_is_needed_is_in_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [rule.title for rule in RULES if f"## {rule.title}\n" not in text] == []
