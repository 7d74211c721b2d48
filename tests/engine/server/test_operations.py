"""Probes, metrics, /engine/state, overload and disconnects: what the platform sees of the engine."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.service.testing import FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTRACT = Path(__file__).parents[3] / "docs" / "contracts"


async def get(kit: Kit, path: str) -> tuple[int, Any]:
    response = await kit.client.get(path)
    return response.status, await response.json()


def contract_example() -> Any:
    text = (CONTRACT / "engine-http.md").read_text(encoding="utf-8")
    block = re.search(r"```json\n(\{\n  \"schema\".*?)```", text, re.DOTALL)
    assert block is not None
    return json.loads(block.group(1))


async def test_every_path_that_the_platform_names_answers(kit: Kit) -> None:  # B25
    text = (CONTRACT / "engine-http.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(/[a-z0-9/]+)(?:\?since=SEQ)?`", text.split("## Requests")[0])
    assert len(paths) >= 10
    for path in paths:
        response = await kit.client.get(path)
        assert response.status == (405 if "completions" in path or "tokenize" in path else 200), path


async def test_state_has_exactly_the_contract_s_keys(kit: Kit) -> None:
    example = contract_example()
    _, state = await get(kit, "/engine/state")
    assert list(state) == list(example)
    for part in ("load", "memory", "tuning"):
        assert set(state[part]) == set(example[part]), part
    assert state["state"] == "ready"
    assert state["schema"] == 1


async def test_oom_events_and_start_failures_have_the_contract_s_keys(start: Start, tmp_path: Path) -> None:
    example = contract_example()
    kit = await start(FakeModelLoader(load_error="oom"), wait_ready=False, service={"state_dir": tmp_path})
    await kit.engine.wait_failed()
    status, state = await get(kit, "/engine/state")
    assert status == 200
    assert (state["state"], state["state_reason"], state["oom_seq"]) == ("failed", "DeviceOOMAtLoad", 1)
    assert set(state["oom_events"][0]) == set(example["oom_events"][0])
    assert set(state["start_failures"][0]) == set(example["start_failures"][0])
    assert (await get(kit, "/engine/state?since=1"))[1]["oom_events"] == []
    samples = await kit.scrape()
    assert samples['kvpilot_engine_oom_events_total{cause="own",phase="load"}'] == 1


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "9" * 30])
async def test_bad_sequence_number_is_refused(kit: Kit, since: str) -> None:
    status, body = await get(kit, f"/engine/state?since={since}")
    assert (status, body["error"]["param"]) == (400, "since")


async def test_platform_is_answered_while_the_model_loads(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    kit = await start(FakeModelLoader(load_gate=gate), wait_ready=False)
    status, state = await get(kit, "/engine/state")
    assert (status, state["state"]) == (200, "loading")
    assert (state["load"], state["memory"], state["tuning"], state["snapshot_age_s"]) == (None, None, None, None)
    assert (await get(kit, "/livez"))[0] == 200
    assert (await get(kit, "/readyz"))[0] == 503
    assert (await get(kit, "/health"))[0] == 503
    assert (await get(kit, "/engine/memory"))[0] == 200
    response = await kit.chat()
    assert (response.status, response.headers["Retry-After"]) == (503, "5")
    samples = await kit.scrape()
    assert samples["kvpilot_engine_kv_usage_ratio"] == 0
    gate.touch()
    await kit.until(lambda: kit.engine.is_ready)
    assert (await get(kit, "/readyz"))[0] == 200


async def test_engine_without_tokenizer_is_not_ready(start: Start) -> None:
    kit = await start(with_text=False)
    assert (await get(kit, "/readyz"))[0] == 503
    assert (await get(kit, "/engine/state"))[1]["state"] == "loading"
    assert (await kit.chat()).status == 503


async def test_probes_after_the_child_died(start: Start, tmp_path: Path) -> None:  # A21, D6
    script = tmp_path / "script"
    script.write_text("crash")
    kit = await start(FakeModelLoader(script=script))
    response = await kit.chat()
    assert response.status == 503
    assert (await response.json())["error"]["code"] == "aborted"
    assert (await get(kit, "/livez"))[0] == 503
    assert (await get(kit, "/readyz"))[0] == 503
    samples = await kit.scrape()
    assert samples["kvpilot_engine_requests_running"] == 0
    assert samples['kvpilot_engine_state{state="failed"}'] == 1


async def test_hung_engine_flips_liveness(start: Start, tmp_path: Path) -> None:  # A21
    script = tmp_path / "script"
    script.write_text("")
    kit = await start(FakeModelLoader(script=script), service={"step_timeout_s": 2.0})
    script.write_text("hang")
    response = await kit.chat()
    assert response.status == 504
    assert (await get(kit, "/livez"))[0] == 503
    script.write_text("")


async def test_everything_is_exported_before_the_first_request(start: Start) -> None:  # E9
    kit = await start()
    samples = await kit.scrape()
    assert samples["kvpilot_engine_kv_blocks"] == 90
    assert samples["kvpilot_engine_kv_block_size_tokens"] == 4
    assert samples['kvpilot_engine_memory_bytes{kind="kv_reserved"}'] == 90_000
    assert samples["kvpilot_engine_memory_utilization_ratio"] == 0.9
    assert samples["kvpilot_engine_max_model_len_tokens"] == 128
    assert samples["kvpilot_engine_time_to_first_token_seconds_count"] == 0
    assert samples['kvpilot_engine_requests_finished_total{reason="stop"}'] == 0
    assert samples['kvpilot_engine_requests_rejected_total{code="queue_full"}'] == 0
    assert samples['kvpilot_engine_oom_events_total{cause="host",phase="warmup"}'] == 0
    labels = 'engine="0",model_name="fake"'
    assert samples[f"vllm:num_requests_running{{{labels}}}"] == 0
    assert samples[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 0


async def test_numbers_of_a_finished_call_are_the_same_under_both_names(start: Start) -> None:
    kit = await start()
    assert (await kit.chat(max_tokens=5)).status == 200
    await kit.until(lambda: kit.gauges() == (0, 0, 0))
    samples = await kit.scrape()
    labels = 'engine="0",model_name="fake"'
    for own, vllm, value in (
        ("generation_tokens_total", "generation_tokens_total", 5),
        ("prompt_tokens_total", "prompt_tokens_total", 1),
        ("request_generation_tokens_sum", "request_generation_tokens_sum", 5),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count", 4),
        ("request_queue_time_seconds_count", "request_queue_time_seconds_count", 1),
    ):
        assert samples[f"kvpilot_engine_{own}"] == value, own
        assert samples[f"vllm:{vllm}{{{labels}}}"] == value, vllm
    assert samples['vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"}'] == 1
    assert samples['kvpilot_engine_step_seconds_count{kind="decode"}'] >= 4


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_hang_up_leave_nothing_behind(start: Start, stream: bool) -> None:  # B21, D6
    kit = await start(FakeModelLoader(step_s=0.01, max_num_seqs=2))
    tasks = [asyncio.create_task(kit.chat(max_tokens=100, ignore_eos=True, stream=stream, n=2)) for _ in range(3)]
    await kit.until(lambda: kit.gauges()[:2] == (2, 4))
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            result.close()
    await kit.until(lambda: kit.gauges() == (0, 0, 0))
    samples = await kit.scrape()
    assert samples["kvpilot_engine_requests_running"] == 0
    assert samples["kvpilot_engine_kv_usage_ratio"] == 0
    assert samples['kvpilot_engine_requests_finished_total{reason="abort"}'] == 6
    assert kit.engine.num_open_requests == 0


async def test_overload_is_429_at_once_and_readiness_stays(start: Start) -> None:  # B23
    kit = await start(FakeModelLoader(step_s=0.1, max_num_seqs=2), service={"max_queue_len": 4})
    responses = await asyncio.gather(*(kit.chat(max_tokens=3) for _ in range(20)))
    refused = [response for response in responses if response.status == 429]
    assert len(refused) == 14
    assert all(int(response.headers["Retry-After"]) > 0 for response in refused)
    assert (await refused[0].json())["error"]["code"] == "queue_full"
    assert (await get(kit, "/readyz"))[0] == 200
    samples = await kit.scrape()
    assert samples['kvpilot_engine_requests_rejected_total{code="queue_full"}'] == 14


async def test_memory_is_shown_as_numbers_and_as_a_table(kit: Kit) -> None:
    _, body = await get(kit, "/engine/memory")
    assert body["memory"]["limit_bytes"] == 90_000
    assert any(line.startswith("KV cache") for line in body["lines"])


def documented_names() -> set[str]:
    text = (CONTRACT / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `((?!kvpilot_operator_)[a-z0-9_:]+)`", text, re.MULTILINE))


async def test_exported_and_documented_metrics_are_the_same(kit: Kit) -> None:
    text = await (await kit.client.get("/metrics")).text()
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    exported = {name for name in exported if not name.endswith("_created")}
    assert exported - documented_names() == set()
    assert documented_names() - exported == set()
