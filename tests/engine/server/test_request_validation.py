"""Bad requests: each is a 4xx in OpenAI's error shape that names the field, and the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientResponse

from kvpilot_engine.server.json_body import body_limit
from kvpilot_engine.service.testing import FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "@"}]


async def error_of(response: ClientResponse, status: int) -> dict[str, Any]:
    body = await response.json()
    assert response.status == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": [999_999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"bad_words": ["ok", " "]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {"type": "object"}, "structured_outputs": {"regex": "a"}}, "guided_json"),
        ({"guided_json": {"type": 5}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_field_is_refused_by_name(kit: Kit, fields: dict[str, Any], param: str, stream: bool) -> None:
    # B2, B6, B13, B14, B17
    body = {"model": "fake", "messages": MESSAGES, "stream": stream, **fields}
    response = await kit.client.post("/v1/chat/completions", json=body)
    error = await error_of(response, 400)
    assert error["param"] == param
    assert (await kit.chat()).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "temperature": None, "seed": None, "stop": None, "n": None, "stream": None},
        {"logprobs": False, "tools": [], "presence_penalty": 0, "response_format": {"type": "text"}, "echo": False},
        {"user": "someone", "store": True, "metadata": {"a": "b"}, "nobody_knows": 1},
        {"spaces_between_special_tokens": False, "skip_special_tokens": True, "add_special_tokens": False},
        {"logit_bias": {}, "bad_words": [], "stop": [], "stop_token_ids": [], "best_of": None, "top_logprobs": 0},
        {"priority": -3, "cache_salt": "", "return_tokens_as_token_ids": True, "reasoning_effort": "low"},
        {"max_tokens": 8, "max_completion_tokens": 8, "top_k": -1},
    ],
)
async def test_unused_and_unknown_fields_do_no_harm(kit: Kit, fields: dict[str, Any]) -> None:
    assert (await kit.chat(**fields)).status == 200


@pytest.mark.parametrize(
    ("num_chars", "fields", "param", "numbers"),
    [
        (80, {}, "messages", ["80", "64"]),
        (64, {}, "messages", ["64"]),
        (8, {"max_tokens": 60}, "max_tokens", ["8", "60", "64"]),
        (8, {"max_completion_tokens": 60}, "max_completion_tokens", ["8", "60", "64"]),
    ],
)
async def test_length_refusal_names_what_was_sent_and_the_limit(
    start: Start, num_chars: int, fields: dict[str, Any], param: str, numbers: list[str]
) -> None:  # B6
    kit = await start(FakeModelLoader(max_model_len=64))
    body = {"messages": [{"role": "user", "content": "x" * num_chars}], **fields}
    error = await error_of(await kit.client.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert all(number in error["message"].replace(",", "").split() or number in error["message"] for number in numbers)
    assert "-" not in error["message"]


async def test_prompt_ids_outside_the_vocabulary_are_refused(kit: Kit) -> None:  # B13
    error = await error_of(await kit.complete([999_999]), 400)
    assert error["param"] == "prompt"
    assert (await kit.complete()).status == 200


@pytest.mark.parametrize("prompt", ["", [], [[]]])
async def test_empty_prompts_are_refused(kit: Kit, prompt: Any) -> None:
    error = await error_of(await kit.complete(prompt), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("content", ["\ud800", [{"type": "text", "text": "\ud800"}]])
@pytest.mark.parametrize("stream", [False, True])
async def test_lone_surrogates_are_refused(kit: Kit, content: Any, stream: bool) -> None:  # B17
    error = await error_of(await kit.chat(content=content, stream=stream), 400)
    assert "surrogate" in error["message"]
    assert error["param"].startswith("messages[0].content")


@pytest.mark.parametrize("field", ["tool_call_id", "name"])
async def test_lone_surrogates_beside_the_content_are_refused(kit: Kit, field: str) -> None:  # B17
    messages = [{"role": "tool", "content": "x", field: "\ud800"}]
    error = await error_of(await kit.client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["param"] == f"messages[0].{field}"


@pytest.mark.parametrize(
    "assistant",
    [{"content": ""}, {"content": None}, {}, {"content": []}],
)
async def test_histories_of_agents_are_taken(kit: Kit, assistant: dict[str, Any]) -> None:  # B18
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "18"}]},
        {"role": "user", "content": "@"},
    ]
    response = await kit.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "raw", [b"[1,2]", b"null", b'"x"', b"{", b"", b"  ", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000]
)
async def test_bodies_that_are_no_object_are_refused(kit: Kit, raw: bytes) -> None:  # B20
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = await kit.client.post(path, data=raw, headers={"Content-Type": "application/json"})
        await error_of(response, 400)


async def test_wrong_content_type_is_415_and_a_missing_one_is_taken(kit: Kit) -> None:  # B20
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    form = await kit.client.post(
        "/v1/chat/completions", data=raw, headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    await error_of(form, 415)
    bare = await kit.client.post("/v1/chat/completions", data=raw, skip_auto_headers=["Content-Type"])
    assert bare.status == 200


async def test_gzip_is_read_when_declared_and_refused_otherwise(kit: Kit) -> None:  # B20
    raw = gzip.compress(json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode())
    headers = {"Content-Type": "application/json"}
    declared = await kit.client.post("/v1/chat/completions", data=raw, headers={**headers, "Content-Encoding": "gzip"})
    assert declared.status == 200
    await error_of(await kit.client.post("/v1/chat/completions", data=raw, headers=headers), 400)
    broken = await kit.client.post(
        "/v1/chat/completions", data=raw[:-12], headers={**headers, "Content-Encoding": "gzip"}
    )
    await error_of(broken, 400)


async def chunked(raw: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(raw), 65536):
        yield raw[i : i + 65536]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_two_mebibytes_pass_and_the_limit_is_413(kit: Kit, is_chunked: bool) -> None:  # B20
    headers = {"Content-Type": "application/json"}
    fits = json.dumps({"messages": MESSAGES, "max_tokens": 1, "metadata": {"pad": "x" * 2**21}}).encode()
    data: Any = chunked(fits) if is_chunked else io.BytesIO(fits)
    assert (await kit.client.post("/v1/chat/completions", data=data, headers=headers)).status == 200
    too_large = b" " * (body_limit(128) + 1)
    data = chunked(too_large) if is_chunked else io.BytesIO(too_large)
    error = await error_of(await kit.client.post("/v1/chat/completions", data=data, headers=headers), 413)
    assert error["code"] == "request_too_large"


async def test_huge_prompts_are_refused_with_numbers_while_a_stream_runs(start: Start) -> None:  # B24
    kit = await start(FakeModelLoader(max_model_len=400, step_s=0.005, block_size=16))
    stream = asyncio.ensure_future(kit.chat(max_tokens=300, ignore_eos=True, stream=True))
    raw = json.dumps({"prompt": "x" * 3_000_000}).encode()
    headers = {"Content-Type": "application/json"}
    huge = [kit.client.post("/v1/completions", data=io.BytesIO(raw), headers=headers) for _ in range(10)]
    for response in await asyncio.gather(*huge):
        error = await error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "3000000 characters" in error["message"]
        assert "400 tokens" in error["message"]
    assert (await kit.events(await stream))[-1] == "[DONE]"


async def test_unknown_model_is_404_with_its_own_code(kit: Kit) -> None:  # B25
    for response in (await kit.chat(model="nope"), await kit.client.get("/v1/models/nope")):
        assert (await error_of(response, 404))["code"] == "model_not_found"


async def test_unknown_path_and_method_have_the_error_shape(kit: Kit) -> None:  # B25
    assert (await error_of(await kit.client.get("/v2/nothing"), 404))["code"] == "not_found"
    response = await kit.client.get("/v1/chat/completions")
    assert (await error_of(response, 405))["code"] == "method_not_allowed"
    assert "POST" in response.headers["Allow"]


async def test_chat_without_a_template_is_refused(start: Start) -> None:
    kit = await start(template=None)
    assert "chat template" in (await error_of(await kit.chat(), 400))["message"]


async def test_key_guards_v1_only(start: Start) -> None:
    kit = await start(api_keys=("secret",))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = await kit.client.get("/v1/models", headers=headers)
        assert (await error_of(response, 401))["code"] == "invalid_api_key"
    assert (await kit.client.get("/v1/models", headers={"Authorization": "Bearer secret"})).status == 200
    for path in ("/livez", "/readyz", "/health", "/metrics", "/version", "/engine/memory", "/engine/state"):
        assert (await kit.client.get(path)).status == 200


async def test_request_id_is_kept_when_sane(kit: Kit) -> None:
    for stream in (False, True):
        body = {"messages": MESSAGES, "max_tokens": 1, "stream": stream}
        response = await kit.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
    response = await kit.client.get("/v2", headers={"x-request-id": "has spaces in it"})
    assert len(response.headers["x-request-id"]) == 32
