"""The stress harness against a small OpenAI server in this process: timing, sizing of prompts, counting of errors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from kvpilot_tools.bench.load import LoadPlan, LoadResult, build_prompts, run_load
from kvpilot_tools.bench.prompts import PromptSizeError, build_prompt, choose_counter
from kvpilot_tools.bench.streaming_client import RequestRecord, Target, base_url
from kvpilot_tools.bench.stress import build_parser, main, measure


@dataclass(slots=True)
class FakeServer:
    """Streams `max_tokens` pieces; a word is a token. `faults` says what the n-th streamed request gets instead."""

    faults: dict[int, str] = field(default_factory=dict)
    tokenize_form: str = "vllm"
    """`vllm`, `llamacpp` or `none`."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        if self.tokenize_form != "none":
            app.router.add_post("/tokenize", self.tokenize)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("prompt" if self.tokenize_form == "vllm" else "content", "")
        return web.json_response({"tokens": list(range(len(text.split())))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        num_prompt = len(body["prompt"].split())
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": num_prompt + 1, "completion_tokens": 1}})
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        if fault == "refuse":
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(value: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(value)}\n\n".encode())

        for number in range(body["max_tokens"]):
            await asyncio.sleep(0)
            if fault == "error" and number == 1:
                await send({"error": {"message": "boom"}})
                break
            if fault == "cut" and number == 1:
                break
            await send({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        if fault is None:
            await send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
            await send({"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def serve(fake: FakeServer) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(fake.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def make_plan(**changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {
        "num_requests": 6,
        "concurrency": 3,
        "prompt_tokens": (5, 9),
        "output_tokens": (4,),
        **changes,
    }
    return LoadPlan(**fields)


async def run_against(fake: FakeServer, session: aiohttp.ClientSession, plan: LoadPlan) -> LoadResult:
    runner, url = await serve(fake)
    target = Target(url=url, model="fake")
    try:
        prompts = await build_prompts(plan, await choose_counter(session, target))
        return await run_load(session, target, plan, prompts)
    finally:
        await runner.cleanup()


async def test_every_request_is_streamed_with_its_lengths(session: aiohttp.ClientSession) -> None:
    fake = FakeServer()
    result = await run_against(fake, session, make_plan())
    assert [record.prompt_tokens for record in result.records] == [5, 9, 5, 9, 5, 9]
    assert result.output_tokens == 24
    assert not result.errors
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)


async def test_no_more_than_the_concurrency_is_in_flight(session: aiohttp.ClientSession) -> None:
    fake = FakeServer()
    await run_against(fake, session, make_plan(num_requests=12, concurrency=3))
    assert 1 <= fake.most_in_flight <= 3


async def test_errors_are_counted_by_kind_and_left_out_of_the_times(session: aiohttp.ClientSession) -> None:
    fake = FakeServer(faults={0: "refuse", 1: "error", 2: "cut"})
    result = await run_against(fake, session, make_plan())
    assert result.errors == {"http 429": 1, "error event": 1, "cut off": 1}
    report = result.as_json()
    assert report["requests"] == {
        "started": 6,
        "succeeded": 3,
        "failed": 3,
        "errors": {"cut off": 1, "error event": 1, "http 429": 1},
        "first_error": report["requests"]["first_error"],
    }
    assert report["ttft_s"]["count"] == 3


@pytest.mark.parametrize("form", ["vllm", "llamacpp", "none"])
async def test_prompts_have_the_wanted_length_by_any_way_of_counting(session: aiohttp.ClientSession, form: str) -> None:
    runner, url = await serve(FakeServer(tokenize_form=form))
    try:
        count_tokens = await choose_counter(session, Target(url=url, model="fake"))
        prompt = await build_prompt(random.Random(0), 40, count_tokens)
    finally:
        await runner.cleanup()
    assert prompt.num_tokens == 40
    assert len(prompt.text.split()) == (39 if form == "none" else 40)  # this fake's usage counts one token more


async def test_words_of_several_tokens_are_no_obstacle() -> None:
    async def count_three_a_word(text: str) -> int:
        return 3 * len(text.split()) + 2

    prompt = await build_prompt(random.Random(0), 32, count_three_a_word)
    assert prompt.num_tokens == 32


async def test_an_unreachable_length_gives_the_nearest() -> None:
    async def count_even_only(text: str) -> int:
        return 2 * len(text.split())

    prompt = await build_prompt(random.Random(0), 31, count_even_only)
    assert abs(prompt.num_tokens - 31) == 1


async def test_prompts_of_one_plan_differ_from_each_other_and_repeat_with_the_seed() -> None:
    async def count_words(text: str) -> int:
        return len(text.split())

    first, again = [await build_prompts(make_plan(seed=4), count_words) for _ in range(2)]
    assert first == again
    assert len({prompt.text for prompt in first}) == 6
    assert first != await build_prompts(make_plan(seed=5), count_words)


async def test_a_server_that_tells_no_count_is_an_error(session: aiohttp.ClientSession) -> None:
    runner, url = await serve(FakeServer())
    try:
        with pytest.raises(PromptSizeError, match="404"):
            await choose_counter(session, Target(url=f"{url}/elsewhere", model="fake"))
    finally:
        await runner.cleanup()


def test_times_are_taken_from_text_alone() -> None:
    record = RequestRecord(index=0, wanted_prompt_tokens=1, wanted_output_tokens=5, sent_s=1.0)
    assert record.ttft_s is None
    record.text_s, record.output_tokens = [1.5, 1.7, 2.3], 5
    assert record.ttft_s == 0.5
    assert record.gaps_s == pytest.approx([0.2, 0.6])
    assert record.time_per_output_token_s == pytest.approx(0.2)


def test_decode_rate_counts_from_when_every_answer_has_begun() -> None:
    def make_record(times: list[float], tokens: int) -> RequestRecord:
        record = RequestRecord(index=0, wanted_prompt_tokens=1, wanted_output_tokens=1, sent_s=0.0, text_s=times)
        record.output_tokens, record.finish_reason = tokens, "length"
        return record

    result = LoadResult(
        plan=make_plan(),
        records=(make_record([1.0, 2.0, 3.0, 4.0], 4), make_record([2.0, 4.0], 4)),  # the second: two tokens an event
        duration_s=4.0,
        memory_peak_bytes={},
    )
    assert result.decode_tokens_per_s == pytest.approx((2 + 2) / 2.0)
    assert result.output_tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_have_its_version(url: str) -> None:
    assert base_url(url) == "http://h:1"


async def test_the_report_has_the_same_fields_with_and_without_successes(session: aiohttp.ClientSession) -> None:
    good = (await run_against(FakeServer(), session, make_plan())).as_json()
    bad = (await run_against(FakeServer(faults=dict.fromkeys(range(6), "refuse")), session, make_plan())).as_json()
    assert good.keys() == bad.keys()
    assert bad["ttft_s"] is None
    assert bad["throughput"] == {"output_tokens_per_s": 0.0, "prompt_tokens_per_s": 0.0, "requests_per_s": 0.0}
    assert set(good["ttft_s"]) == {"count", "mean", "median", "p95", "p99", "smallest", "largest"}
    assert set(good) == {
        "schema", "load", "requests", "duration_s", "ttft_s", "ttft_s_by_prompt_tokens", "inter_token_s",
        "time_per_output_token_s", "request_s", "throughput", "memory_peak_bytes", "records",
    }  # fmt: skip
    json.dumps([good, bad], allow_nan=False)


async def test_the_command_measures_what_its_options_say() -> None:
    fake = FakeServer()
    runner, url = await serve(fake)
    argv = ["--url", f"{url}/v1", "--concurrency", "2", "--requests", "4", "--prompt-tokens", "6", "--max-tokens", "3"]
    try:
        target, result = await measure(build_parser().parse_args(argv))
    finally:
        await runner.cleanup()
    assert target.model == "fake"
    assert [record.prompt_tokens for record in result.records] == [6] * 4
    assert len(fake.bodies) == 5  # one to warm up


def test_a_run_leaves_json_and_picture_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes: dict[str, int] = {}

    async def run(name: str, fake: FakeServer) -> None:
        runner, url = await serve(fake)
        argv = ["--url", url, "--concurrency", "3", "--prompt-tokens", "4", "--max-tokens", "2", "--json-line"]
        argv += ["--json", str(tmp_path / f"{name}.json"), "--png", str(tmp_path / f"{name}.png")]
        try:
            codes[name] = await asyncio.to_thread(main, argv)
        finally:
            await runner.cleanup()

    asyncio.run(run("good", FakeServer()))
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last_line)["requests"]["succeeded"] == 3
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")
    asyncio.run(run("bad", FakeServer(faults={2: "refuse"})))
    assert codes == {"good": 0, "bad": 1}
    assert json.loads((tmp_path / "bad.json").read_text())["requests"]["errors"] == {"http 429": 1}


def test_no_server_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    assert "kvpilot-bench: no model from" in capsys.readouterr().err
