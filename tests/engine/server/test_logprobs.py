"""Log-probabilities in answers: shapes, alignment with the text, echo, and numbers that JSON can hold."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.errors import ModelExecutionError
from kvpilot_engine.server.answering import choose_best
from kvpilot_engine.server.deltas import ToldToken
from kvpilot_engine.server.json_body import encode_json
from kvpilot_engine.server.logprob_answers import FLOOR, LogprobShape, floor_logprob
from kvpilot_engine.server.openai_answers import WholeChoice
from kvpilot_engine.service.testing import FakeModelLoader
from kvpilot_engine.text.testing import make_tokenizer

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENIZER = make_tokenizer()


async def test_chat_tells_each_token_of_its_text(kit: Kit) -> None:
    body = await (await kit.chat(max_tokens=3, logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["A", "B", "C"]
    assert content[0] == {
        "token": "A",
        "logprob": -0.5,
        "bytes": [65],
        "top_logprobs": [
            {"token": "A", "logprob": -0.5, "bytes": [65]},
            {"token": "B", "logprob": -1.0, "bytes": [66]},
        ],
    }


async def test_chat_without_alternatives_has_empty_lists(kit: Kit) -> None:
    body = await (await kit.chat(max_tokens=1, logprobs=True)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_completion_has_four_lists(kit: Kit) -> None:
    body = await (await kit.complete(max_tokens=2, logprobs=1)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"A": -0.5}, {"B": -0.5}],
        "text_offset": [0, 1],
    }


async def test_minus_infinity_is_a_finite_floor(kit: Kit) -> None:  # B9
    response = await kit.complete(max_tokens=1, logprobs=8)
    body = json.loads(await response.text(), parse_constant=lambda name: pytest.fail(name))
    assert min(body["choices"][0]["logprobs"]["top_logprobs"][0].values()) == FLOOR


async def test_not_a_number_is_a_fault_and_never_a_value() -> None:  # B9
    assert [floor_logprob(value) for value in (-1.5, -1e9, -math.inf)] == [-1.5, FLOOR, FLOOR]
    with pytest.raises(ModelExecutionError):
        floor_logprob(math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"logprob": math.nan})


@pytest.mark.parametrize("path", ["chat", "completion"])
@pytest.mark.parametrize("fields", [{"stop": ["DEFG"]}, {"stop": ["GH", "DEFX"]}, {"stop": "YZ!"}, {}, {"n": 2}])
async def test_streamed_tokens_come_with_their_text_and_join_to_the_whole(
    kit: Kit, path: str, fields: dict[str, Any]
) -> None:
    def call(**more: Any) -> Any:
        if path == "chat":
            return kit.chat(max_tokens=20, logprobs=True, top_logprobs=1, **fields, **more)
        return kit.complete(max_tokens=20, logprobs=1, **fields, **more)

    def tokens_of(choice: dict[str, Any]) -> list[str]:
        told = choice["logprobs"] or {"content": [], "tokens": []}
        return [entry["token"] for entry in told["content"]] if "content" in told else list(told["tokens"])

    def text_of(choice: dict[str, Any]) -> str:
        return str(choice["delta"].get("content", "") if path == "chat" else choice["text"])

    whole = (await (await call()).json())["choices"]
    streamed: list[list[str]] = [[] for _ in whole]
    offsets: list[list[int]] = [[] for _ in whole]
    for event in (await kit.events(await call(stream=True)))[:-1]:
        choice = event["choices"][0]
        assert "".join(tokens_of(choice)) == text_of(choice)
        streamed[choice["index"]] += tokens_of(choice)
        offsets[choice["index"]] += (choice["logprobs"] or {}).get("text_offset", [])
    assert streamed == [tokens_of(choice) for choice in whole]
    text = whole[0]["message"]["content"] if path == "chat" else whole[0]["text"]
    assert "".join(streamed[0]) == text
    if path == "completion":
        assert offsets[0] == whole[0]["logprobs"]["text_offset"] == list(range(len(text)))


async def test_the_token_that_ends_is_told_only_when_stops_are_kept(kit: Kit) -> None:
    for fields, expected in (({}, ["Y", "Z"]), ({"include_stop_str_in_output": True}, ["Y", "Z", "<|end|>"])):
        body = await (await kit.chat("X", max_tokens=9, logprobs=True, **fields)).json()
        choice = body["choices"][0]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == expected
        assert choice["message"]["content"] == "YZ"  # a control token is no text
        assert body["usage"]["completion_tokens"] == 3
    body = await (await kit.chat("X", max_tokens=9, include_stop_str_in_output=True, skip_special_tokens=False)).json()
    assert body["choices"][0]["message"]["content"] == "YZ<|end|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt_and_its_tokens(kit: Kit, stream: bool) -> None:  # B7
    response = await kit.complete("hi@", max_tokens=2, echo=True, logprobs=1, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in (await kit.events(response))[:-1]]
        text = "".join(choice["text"] for choice in choices)
        told = {key: [item for choice in choices for item in choice["logprobs"][key]] for key in choices[0]["logprobs"]}
    else:
        body = await response.json()
        text, told = body["choices"][0]["text"], body["choices"][0]["logprobs"]
        assert body["usage"]["completion_tokens"] == 2
    assert text == "hi@AB"
    assert told == {
        "tokens": ["h", "i", "@", "A", "B"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {"@": -0.5}, {"A": -0.5}, {"B": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a b c", [97, 32, 98, 32, 99], "x" * 100])
@pytest.mark.parametrize("fields", [{"logprobs": 1}, {}])
async def test_prompt_alone_is_scored(kit: Kit, stream: bool, prompt: Any, fields: dict[str, Any]) -> None:  # B7
    response = await kit.complete(prompt, echo=True, max_tokens=0, stream=stream, **fields)
    text = "a b c" if isinstance(prompt, list) else prompt
    if stream:
        events = await kit.events(response)
        assert len(events) == 2
        choice = events[0]["choices"][0]
    else:
        body = await response.json()
        assert response.status == 200, body
        assert body["usage"]["completion_tokens"] == 0
        choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    if fields:
        assert "".join(choice["logprobs"]["tokens"]) == text
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(text) - 1)
    else:
        assert choice["logprobs"] is None
    assert (await kit.complete()).status == 200


async def test_long_prompt_is_scored_off_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:  # B24
    kit = await start(FakeModelLoader(max_model_len=1000, block_size=16))
    threads: set[str] = set()
    original = LogprobShape.completion

    def completion(self: LogprobShape, tokens: Sequence[ToldToken]) -> dict[str, object]:
        threads.add(threading.current_thread().name)
        return original(self, tokens)

    monkeypatch.setattr(LogprobShape, "completion", completion)
    for stream in (False, True):
        response = await kit.complete("x" * 900, echo=True, max_tokens=0, logprobs=5, stream=stream)
        body = (await kit.events(response))[0] if stream else await response.json()
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 900
    assert all(name.startswith("text") for name in threads)


async def test_echo_of_several_prompts_and_choices(kit: Kit) -> None:
    body = await (await kit.complete(["x@", "K"], n=2, max_tokens=1, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["x@A", "x@A", "KL", "KL"]


async def test_prompt_logprobs_have_the_shape_of_vllm(kit: Kit) -> None:
    chat = await (await kit.chat("hi@", max_tokens=1, prompt_logprobs=1)).json()
    assert chat["prompt_logprobs"] == [
        None,
        {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}},
        {"64": {"logprob": -0.5, "rank": 1, "decoded_token": "@"}},
    ]
    completion = await (await kit.complete("hi@", max_tokens=1, prompt_logprobs=2)).json()
    assert [len(entry) for entry in completion["choices"][0]["prompt_logprobs"][1:]] == [2, 2]
    assert "prompt_logprobs" not in await (await kit.chat(max_tokens=1)).json()


async def test_tokens_may_be_named_by_their_ids(kit: Kit) -> None:
    body = await (await kit.complete(max_tokens=1, logprobs=2, return_tokens_as_token_ids=True)).json()
    told = body["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:65"]
    assert told["top_logprobs"] == [{"token_id:65": -0.5, "token_id:66": -1.0}]


async def test_best_candidates_are_ranked_by_their_mean_log_probability(kit: Kit) -> None:
    body = await (await kit.complete("@", n=1, best_of=3, max_tokens=4)).json()
    assert [choice["text"] for choice in body["choices"]] == ["ABCD"]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12


async def test_likelier_candidates_of_each_prompt_come_first() -> None:
    class Told(NamedTuple):
        mean_logprob: float

    candidates = [WholeChoice(text=[text]) for text in "abcdef"]
    means = [Told(mean) for mean in (-3.0, -1.0, -2.0, -1.0, -9.0, -1.0)]
    chosen = choose_best(candidates, means, num_choices=2, num_candidates=3)
    assert ["".join(choice.text) for choice in chosen] == ["b", "c", "d", "f"]


async def test_two_halves_of_a_character_keep_both_alternatives() -> None:
    half = TOKENIZER.encode("é", specials_as_text=True)
    entry = TokenLogprobs(half[0], -1.0, 1, ((half[0], -1.0), (half[1], -2.0), (TokenId(97), -3.0)))
    told = LogprobShape(TOKENIZER, num_top=3, as_ids=False)
    completion: Any = told.completion([ToldToken(half[0], 0, entry)])
    assert completion["top_logprobs"] == [{"�": -1.0, "a": -3.0}]  # two of one name: the likelier one
    unlikely = TokenLogprobs(half[1], -2.0, 2, entry.top)
    completion = told.completion([ToldToken(half[1], 0, unlikely)])
    assert completion["top_logprobs"] == [{"�": -1.0, "a": -3.0}]
    chat: Any = told.chat([ToldToken(half[0], 0, entry)])
    assert [top["bytes"] for top in chat["content"][0]["top_logprobs"]] == [[0xC3], [0xA9], [97]]
    by_id: Any = LogprobShape(TOKENIZER, num_top=3, as_ids=True).completion([ToldToken(half[0], 0, entry)])
    assert len(by_id["top_logprobs"][0]) == 3
