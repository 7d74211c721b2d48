"""Answers of /v1/chat/completions and /v1/completions, whole and streamed, against a model that says the alphabet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.service.testing import END, FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_chat_answer_has_the_shape_of_openai(kit: Kit) -> None:
    response = await kit.chat()
    body = await response.json()
    assert response.status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert isinstance(body["created"], int)
    message = {"role": "assistant", "content": "ABCDEFGH", "refusal": None}
    end = {"finish_reason": "length", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, **end}]
    assert body["system_fingerprint"].startswith("kvpilot-")
    details = body["usage"]["prompt_tokens_details"]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 8,
        "total_tokens": 9,
        "prompt_tokens_details": details,
    }


async def test_chat_without_a_limit_goes_to_the_end_token(kit: Kit) -> None:
    body = await (await kit.chat(max_tokens=None)).json()
    assert body["choices"][0]["message"]["content"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 27


async def test_ignore_eos_goes_on(kit: Kit) -> None:
    body = await (await kit.chat(max_tokens=30, ignore_eos=True)).json()
    assert body["choices"][0]["message"]["content"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZABC"
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("@", ["ABC"]),
        (["@", "K"], ["ABC", "LMN"]),
        ([ord("@")], ["ABC"]),
        ([[ord("@")], [ord("C"), ord("K")]], ["ABC", "LMN"]),
    ],
)
async def test_completion_takes_every_form_of_prompt(kit: Kit, prompt: Any, texts: list[str]) -> None:
    body = await (await kit.complete(prompt, max_tokens=3)).json()
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_completion_defaults_to_sixteen_tokens(kit: Kit) -> None:
    body = await (await kit.complete()).json()
    assert body["usage"]["completion_tokens"] == 16


async def test_choices_count_the_prompt_once(kit: Kit) -> None:
    body = await (await kit.chat(content="xx@", n=3, max_tokens=2)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["AB"] * 3
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 6)


async def test_stop_token_ids_end_without_their_text(kit: Kit) -> None:
    body = await (await kit.chat(stop_token_ids=[ord("D")])).json()
    assert body["choices"][0]["message"]["content"] == "ABC"
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFGHIJ", "ABC"),
        (["GH", "DEFX"], "ABCDEF"),
        ("YZ!", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_cut_out_and_nothing_else(kit: Kit, stop: Any, text: str, stream: bool) -> None:  # B4
    response = await kit.chat(stop=stop, max_tokens=None, stream=stream)
    if not stream:
        assert (await response.json())["choices"][0]["message"]["content"] == text
        return
    events = await kit.events(response)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert all(delta["content"] for delta in deltas[1:-1])  # no empty deltas between role and finish
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_frees_the_blocks_as_a_normal_end(start: Start) -> None:
    kit = await start(FakeModelLoader(step_s=0.005))
    await kit.chat(stop="C", max_tokens=100, ignore_eos=True)
    await kit.until(lambda: kit.gauges() == (0, 0, 0))
    assert kit.engine.snapshot.stats.finished_total["stop"] == 1


async def test_chat_stream_has_role_text_finish_and_one_end_marker(kit: Kit) -> None:  # B2
    response = await kit.chat(max_tokens=3, stream=True)
    events = await kit.events(response)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "A"},
        {"content": "B"},
        {"content": "C"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 4 + ["length"]
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_completion_stream_joins_to_the_whole_text(kit: Kit) -> None:
    events = await kit.events(await kit.complete(["@", "K"], max_tokens=4, stream=True))
    texts = ["", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["ABCD", "LMNO"]


@pytest.mark.parametrize(
    ("options", "is_sent"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_usage_is_streamed_only_when_asked_for(kit: Kit, options: Any, is_sent: bool) -> None:  # B1
    fields = {} if options is None else {"stream_options": options}
    events = await kit.events(await kit.chat(stream=True, **fields))
    assert events[-1] == "[DONE]"
    if not is_sent:
        assert all("usage" not in event for event in events[:-1])
        return
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["total_tokens"] == 9


async def test_stream_options_without_stream_are_refused(kit: Kit) -> None:  # B1
    response = await kit.chat(stream_options={"include_usage": True})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "stream_options"


async def test_fault_in_mid_stream_is_one_error_object_and_the_end(start: Start, tmp_path: Path) -> None:  # B2
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script, step_s=0.01))
    response = await kit.chat(max_tokens=100, ignore_eos=True, stream=True)
    received = b""
    while received.count(b'"content":"') < 3:
        received += await response.content.readany()
    script.write_text("fault")
    rest = (received + await response.read()).decode()
    events = [line[6:] for line in rest.split("\n\n") if line.startswith("data: ")]
    assert '"error"' in events[-1]
    assert "engine_error" in events[-1]
    assert sum('"error"' in event for event in events) == 1
    assert not any('"finish_reason":"' in event for event in events)
    assert "[DONE]" not in events
    await kit.until(lambda: kit.gauges() == (0, 0, 0))


async def test_fault_before_the_first_token_is_a_plain_error(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("fault")
    kit = await start(FakeModelLoader(script=script))
    for stream in (False, True):
        response = await kit.chat(stream=stream)
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "engine_error"


async def test_unusable_logits_end_one_request_and_no_other(start: Start, tmp_path: Path) -> None:  # B9
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script, step_s=0.005, max_model_len=200))
    tasks = [asyncio.create_task(kit.chat(max_tokens=150, ignore_eos=True)) for _ in range(2)]
    await kit.until(lambda: kit.gauges()[0] == 2)
    script.write_text("nan")
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    (failed,) = [task.result() for task in done]
    error = (await failed.json())["error"]
    assert (failed.status, error["code"]) == (500, "engine_error")
    assert "not finite" in error["message"]
    (other,) = running
    assert (await other).status == 200
    await kit.until(lambda: kit.gauges() == (0, 0, 0))


async def test_stream_that_stalls_is_ended_with_an_error(start: Start, tmp_path: Path) -> None:  # B2, A21
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script, step_s=0.01), service={"step_timeout_s": 1.0})
    response = await kit.chat(max_tokens=100, ignore_eos=True, stream=True)
    await response.content.readany()
    script.write_text("hang")
    rest = (await response.read()).decode()
    script.write_text("")
    assert '"code":"deadline_exceeded"' in rest
    assert "[DONE]" not in rest
    assert '"finish_reason":"' not in rest


async def test_silent_stream_gets_comments(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script), keep_alive_s=0.05)
    script.write_text("hang")
    response = await kit.chat(stream=True)
    assert await response.content.readline() == b": keep-alive\n"
    script.write_text("")
    assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_request_past_its_deadline_is_ended_and_freed(start: Start) -> None:
    kit = await start(FakeModelLoader(step_s=0.02), request_timeout_s=0.2)
    response = await kit.chat(max_tokens=120, ignore_eos=True)
    assert response.status == 504
    assert (await response.json())["error"]["code"] == "deadline_exceeded"
    await kit.until(lambda: kit.gauges() == (0, 0, 0))


@pytest.mark.parametrize("is_chat", [True, False])
async def test_ids_are_told_when_asked_for(kit: Kit, is_chat: bool) -> None:
    ask = kit.chat if is_chat else kit.complete
    options = {"max_tokens": 9, "stop": "Z!", "return_token_ids": True}  # Z is held back: it may begin a stop string
    body = await (await ask("xX", **options)).json()
    choice = body["choices"][0]
    assert choice["token_ids"] == [*b"YZ", END]
    assert (body if is_chat else choice)["prompt_token_ids"] == list(b"xX")
    events = (await kit.events(await ask("xX", stream=True, **options)))[:-1]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == list(b"xX")
    assert [i for choice in choices for i in choice.get("token_ids", ())] == [*b"YZ", END]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert "token_ids" not in (await (await ask("xX", max_tokens=1)).json())["choices"][0]


async def test_default_names_and_aliases_are_served(kit: Kit) -> None:
    body = await (await kit.client.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["fake", "alias"]
    assert (await kit.chat(model="alias")).status == 200
    assert (await (await kit.client.get("/v1/models/alias")).json())["id"] == "alias"


async def test_tokenize_and_detokenize_are_inverse(kit: Kit) -> None:
    body = await (await kit.client.post("/tokenize", json={"prompt": "hi"})).json()
    assert body == {"count": 2, "max_model_len": 128, "tokens": [104, 105]}
    text = await (await kit.client.post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert text == {"prompt": "hi"}
    chat = await (await kit.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert chat["tokens"] == [104, 105]


async def test_control_text_of_a_user_stays_text(kit: Kit) -> None:  # B12
    body = {"messages": [{"role": "user", "content": "<|end|>"}]}
    tokens = (await (await kit.client.post("/tokenize", json=body)).json())["tokens"]
    assert END not in tokens
