"""Tool calls and structured output over HTTP: what a model said becomes calls, content and finish reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvpilot_engine.server.testing import make_byte_constraints
from kvpilot_engine.service.testing import FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = (
    "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'


async def serve(start: Start, said: str, **server: Any) -> Kit:
    loader = FakeModelLoader(max_model_len=340, said=said, make_constraints=make_byte_constraints)
    return await start(loader, template=TEMPLATE, **server)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def json_kit(start_shared: Start) -> Kit:
    """A model that always says one JSON object."""
    return await serve(start_shared, '{"q": "x"}')


async def ask(kit: Kit, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """The message and finish reason of a whole answer, checked to be what its stream joins to."""
    options = {"tools": TOOLS, "max_tokens": 200, **fields}
    response = await kit.chat("@", **options)
    body = await response.json()
    assert response.status == 200, body
    ChatCompletion.model_validate(body, strict=True)
    choice = body["choices"][0]
    chunks = (await kit.events(await kit.chat("@", stream=True, **options)))[:-1]
    content, calls = "", list[dict[str, Any]]()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"]
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert content == (choice["message"]["content"] or "")
    assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
    return choice["message"], choice["finish_reason"]


async def test_call_is_told_beside_the_content_before_it(start: Start) -> None:
    kit = await serve(start, f"Let me look. {CALL}")
    message, reason = await ask(kit)
    assert (message["content"], reason) == ("Let me look.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"q": "é"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
async def test_wanted_call_has_no_content(start: Start, choice: Any) -> None:
    message, reason = await ask(await serve(start, CALL), tool_choice=choice)
    assert (message["content"], reason) == (None, "tool_calls")
    assert len(message["tool_calls"]) == 1


async def test_several_calls_keep_their_order(start: Start) -> None:
    other = CALL.replace("é", "x")
    message, reason = await ask(await serve(start, f"{CALL}\n{other}"))
    assert [json.loads(call["function"]["arguments"])["q"] for call in message["tool_calls"]] == ["é", "x"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert reason == "tool_calls"


async def test_answer_without_a_call_is_plain(start: Start) -> None:
    kit = await serve(start, "No need <tool")
    message, reason = await ask(kit)
    assert (message["content"], reason) == ("No need <tool", "stop")
    assert "tool_calls" not in message


async def test_call_that_is_cut_off_ends_by_length(start: Start) -> None:
    message, reason = await ask(await serve(start, CALL), max_tokens=50)
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"q"')


async def test_tools_that_may_not_be_called_are_not_looked_for(start: Start) -> None:
    kit = await serve(start, CALL)
    message, reason = await ask(kit, tool_choice="none")
    assert (message["content"], reason) == (CALL, "stop")


async def test_log_probabilities_go_with_calls_and_content(start: Start) -> None:
    kit = await serve(start, f"Hi {CALL}")
    body = await (await kit.chat("@", tools=TOOLS, max_tokens=200, logprobs=True)).json()
    whole = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert len(whole) == len(f"Hi {CALL}".encode())
    streamed: list[str] = []
    for event in (await kit.events(await kit.chat("@", tools=TOOLS, max_tokens=200, logprobs=True, stream=True)))[:-1]:
        told = event["choices"][0]["logprobs"]
        streamed += [entry["token"] for entry in (told or {"content": []})["content"]]
    assert streamed == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": r"\{.*\}"},
        {"guided_choice": ['{"q": "x"}', "other"]},
        {"guided_grammar": 'start: "{" /[^}]*/ "}"'},
    ],
)
async def test_grammar_ends_the_output_in_chat_and_completions(json_kit: Kit, fields: dict[str, Any]) -> None:
    chat = await (await json_kit.chat("@", max_tokens=40, **fields)).json()
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["finish_reason"]) == ('{"q": "x"}', "stop")
    completion = await (await json_kit.complete("@", max_tokens=40, **fields)).json()
    assert completion["choices"][0]["text"] == '{"q": "x"}'


async def test_tools_are_refused_where_the_template_ignores_them(kit: Kit) -> None:
    response = await kit.chat("@", tools=TOOLS)
    assert (response.status, (await response.json())["error"]["param"]) == (400, "tools")


async def test_tokenize_shows_the_tools_to_the_template(json_kit: Kit) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert (await (await json_kit.client.post("/tokenize", json=body)).json())["tokens"] == list(b"hi1")


async def test_grammar_that_becomes_too_complex_is_a_bad_request_and_the_engine_goes_on(start: Start) -> None:
    kit = await serve(start, "aaa")
    refused = await kit.chat("@", guided_grammar='start: "a" start')
    assert refused.status == 400, await refused.text()
    assert "too complex to follow" in (await refused.json())["error"]["message"]
    assert (await kit.chat("@", guided_regex="a+")).status == 200
