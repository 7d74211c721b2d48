"""The two-process path with a real child: outputs, aborts, refusals, and every way in which a child can end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelExecutionError,
    NeverFitsError,
    OOMCause,
    OOMPhase,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from kvpilot_engine.service.async_engine import AsyncEngine, EngineState
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.service.messages import AbortRequest
from kvpilot_engine.service.open_requests import RETRY_AFTER_S
from kvpilot_engine.service.testing import FakeModelLoader

EngineKit = Any


async def read_all(stream: GenerationStream) -> tuple[str, list[FinishReason]]:
    tokens: list[int] = []
    reasons: list[FinishReason] = []
    async for output in stream:
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            reasons.append(output.finish_reason)
    return "".join(chr(token) for token in tokens), reasons


def gauges(engine: AsyncEngine) -> tuple[int, int, int]:
    assert engine.snapshot is not None
    stats = engine.snapshot.stats
    return stats.num_running, stats.num_waiting_capacity + stats.num_waiting_budget, stats.num_blocks_used


async def test_request_gets_its_tokens_in_order_and_one_finish_reason(kit: EngineKit) -> None:
    engine = await kit.start()
    async with engine.generate([kit.request("a")]) as stream:
        text, reasons = await read_all(stream)
    assert (text, reasons) == ("ABCDEFGH", [FinishReason.LENGTH])
    assert engine.num_open_requests == 0


async def test_choices_of_one_call_come_in_one_stream(kit: EngineKit) -> None:
    engine = await kit.start()
    async with engine.generate([kit.request(f"r{i}") for i in range(4)]) as stream:
        text, reasons = await read_all(stream)
    assert sorted(text) == sorted("ABCDEFGH" * 4)
    assert reasons == [FinishReason.LENGTH] * 4


async def test_leaving_the_stream_frees_the_blocks_and_aborts_once(kit: EngineKit) -> None:  # B21
    engine = await kit.start(FakeModelLoader(step_s=0.01))
    sent: list[object] = []
    original = engine._link.send

    def listen(command: object) -> None:
        sent.append(command)
        original(command)

    engine._link.send = listen
    async with engine.generate([kit.request("a", max_tokens=100, ignore_eos=True)]) as stream:
        await anext(stream)
    stream.close()
    await kit.until(lambda: gauges(engine) == (0, 0, 0))
    assert [command for command in sent if isinstance(command, AbortRequest)] == [AbortRequest(RequestId("a"))]


async def test_normal_end_never_aborts(kit: EngineKit) -> None:  # B21
    engine = await kit.start()
    async with engine.generate([kit.request("a")]) as stream:
        await read_all(stream)
    async with engine.generate([kit.request("b")]) as stream:
        await read_all(stream)
    assert engine.snapshot is not None
    await kit.until(lambda: engine.snapshot.stats.finished_total["length"] == 2)
    assert engine.snapshot.stats.finished_total["abort"] == 0


async def test_cancelled_consumer_aborts_waiting_request(kit: EngineKit) -> None:  # B21
    engine = await kit.start(FakeModelLoader(step_s=0.05, max_num_seqs=1), max_num_seqs=1)

    async def consume(name: str) -> None:
        async with engine.generate([kit.request(name, max_tokens=100, ignore_eos=True)]) as stream:
            await read_all(stream)

    tasks = [asyncio.create_task(consume(name)) for name in ("first", "second")]
    await kit.until(lambda: gauges(engine)[:2] == (1, 1))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await kit.until(lambda: gauges(engine) == (0, 0, 0))  # D6: nothing is left over


async def test_queue_is_bounded_and_counts_choices(kit: EngineKit) -> None:  # B23
    engine = await kit.start(FakeModelLoader(step_s=0.05, max_num_seqs=2), max_num_seqs=2, max_queue_len=4)
    streams: list[GenerationStream] = []
    refused, retry_after_s = 0, 0
    for i in range(20):
        try:
            streams.append(engine.generate([kit.request(f"r{i}")]))
        except OverloadedError as error:
            refused += 1
            retry_after_s = error.retry_after_s
    assert (len(streams), refused, retry_after_s) == (6, 14, RETRY_AFTER_S)
    assert engine.is_ready
    with pytest.raises(InvalidRequestError, match="at most 6"):
        engine.generate([kit.request(f"n{i}") for i in range(7)])
    for stream in streams:
        assert await read_all(stream) == ("ABCDEFGH", [FinishReason.LENGTH])
    async with engine.generate([kit.request(f"n{i}") for i in range(6)]) as stream:
        assert (await read_all(stream))[1] == [FinishReason.LENGTH] * 6


async def test_never_fitting_request_is_refused_by_type_and_the_next_one_runs(kit: EngineKit) -> None:  # A2
    engine = await kit.start(FakeModelLoader(max_model_len=32))
    async with engine.generate([kit.request("a", prompt="x" * 30, max_tokens=20)]) as stream:
        with pytest.raises(NeverFitsError, match=r"50 tokens.*32"):
            await anext(stream)
    async with engine.generate([kit.request("b")]) as stream:
        assert (await read_all(stream))[0] == "ABCDEFGH"


async def test_every_preemption_is_a_log_line_with_what_was_lost(kit: EngineKit, tmp_path: Path) -> None:  # A4
    log = tmp_path / "log"
    engine = await kit.start(
        configure_child_logging=partial(logging.basicConfig, filename=log, level="INFO"), gpu_memory_utilization=0.35
    )
    requests = [kit.request(f"r{i}", prompt=chr(97 + i) * 20, max_tokens=80, ignore_eos=True) for i in range(4)]
    async with engine.generate(requests) as stream:
        assert (await read_all(stream))[1] == [FinishReason.LENGTH] * 4
    lines = re.findall(
        r"request (r\d) preempted .*: (\d+) computed tokens lost, preemption (\d+) of this request", log.read_text()
    )
    assert engine.snapshot is not None
    await kit.until(lambda: engine.snapshot.stats.finished_total["length"] == 4)
    assert len(lines) == engine.snapshot.stats.num_preemptions_total > 0
    assert all(20 <= int(lost) < 100 for _, lost, _ in lines)
    for name in {name for name, _, _ in lines}:
        counts = [int(count) for other, _, count in lines if other == name]
        assert counts == list(range(1, len(counts) + 1))


async def test_child_killed_ends_every_stream_and_fails_the_engine(kit: EngineKit) -> None:  # A21
    engine = await kit.start(FakeModelLoader(step_s=0.01))
    streams = [engine.generate([kit.request(f"r{i}", max_tokens=100, ignore_eos=True)]) for i in range(3)]
    await anext(streams[0])
    os.kill(engine.child_pid or 0, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(RequestAbortedError):
            await read_all(stream)
    failure = await engine.wait_failed()
    assert (failure.exit_code, engine.state, engine.is_alive) == (70, EngineState.FAILED, False)
    with pytest.raises(UnavailableError):
        engine.generate([kit.request("late")])


@pytest.mark.parametrize("is_loading", [False, True])
async def test_child_killed_by_the_kernel_for_memory_is_a_host_oom(
    kit: EngineKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loading: bool
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr("kvpilot_engine.service.async_engine.count_kernel_oom_kills", lambda: next(counts))
    gate = tmp_path / "gate"
    loader = FakeModelLoader(load_gate=gate if is_loading else None)
    engine = await kit.start(loader, wait_ready=not is_loading, state_dir=tmp_path)
    os.kill(engine.child_pid or 0, signal.SIGKILL)
    failure = await engine.wait_failed()
    assert failure.exit_code == (71 if is_loading else 74)
    assert (failure.termination["reason"], failure.termination["cause"]) == ("HostOOMKilled", "host")
    assert failure.termination["suggested"] == {"utilization": None, "max_model_len": None}
    assert [event.cause for event in engine.oom_events] == [OOMCause.HOST]
    assert engine.start_failures == ()


async def test_hung_step_flips_liveness_and_ends_streams(kit: EngineKit, tmp_path: Path) -> None:  # A21, B2
    script = tmp_path / "script"
    script.write_text("")
    engine = await kit.start(FakeModelLoader(script=script), step_timeout_s=2.0)
    script.write_text("hang")
    async with engine.generate([kit.request("a")]) as stream:
        assert engine.is_alive
        with pytest.raises(DeadlineExceededError):
            await read_all(stream)
    assert not engine.is_alive
    assert not engine.is_ready
    script.write_text("")
    await kit.until(lambda: engine.is_ready)


async def test_idle_engine_stays_alive(kit: EngineKit) -> None:  # A21
    engine = await kit.start(step_timeout_s=10.0)
    first = engine.snapshot
    await kit.until(lambda: engine.snapshot is not first)
    assert engine.is_alive


async def test_step_fault_ends_its_requests_only(kit: EngineKit, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("fault")
    engine = await kit.start(FakeModelLoader(script=script))
    async with engine.generate([kit.request("a")]) as stream:
        with pytest.raises(ModelExecutionError, match="a step failed"):
            await read_all(stream)
    script.write_text("")
    async with engine.generate([kit.request("b")]) as stream:
        assert (await read_all(stream))[0] == "ABCDEFGH"


@pytest.mark.parametrize(("command", "code"), [("bug", 70), ("crash", 70), ("oom", 74)])
async def test_fatal_step_ends_the_engine_with_a_known_code(
    kit: EngineKit, tmp_path: Path, command: str, code: int
) -> None:  # A21
    script, log = tmp_path / "script", tmp_path / "termination"
    script.write_text("")
    engine = await kit.start(FakeModelLoader(script=script), termination_log=log)
    script.write_text(command)
    async with engine.generate([kit.request("a")]) as stream:
        with pytest.raises(RequestAbortedError):
            await read_all(stream)
    assert (await engine.wait_failed()).exit_code == code
    assert not engine.is_alive


async def test_oom_while_serving_is_an_event_and_the_last_words(kit: EngineKit, tmp_path: Path) -> None:
    script, log = tmp_path / "script", tmp_path / "termination"
    script.write_text("oom")
    engine = await kit.start(FakeModelLoader(script=script), termination_log=log)
    with contextlib.suppress(RequestAbortedError):
        async with engine.generate([kit.request("a")]) as stream:
            await read_all(stream)
    termination = (await engine.wait_failed()).termination
    assert termination["reason"] == "DeviceOOMWhileServing"
    assert (termination["phase"], termination["cause"], termination["oom_seq"]) == ("decode", "own", 1)
    assert termination["suggested"] == {"utilization": 0.855, "max_model_len": None}
    assert log.read_text().count("\n") == 1
    assert engine.oom_seq == 1
    assert dict(engine.oom_counts) == {(OOMPhase.DECODE, OOMCause.OWN): 1}
    assert not engine.oom_events[0].survived


async def test_unwritable_termination_log_changes_nothing(kit: EngineKit, tmp_path: Path) -> None:
    engine = await kit.start(
        FakeModelLoader(load_error="does_not_fit"), wait_ready=False, termination_log=tmp_path / "none" / "log"
    )
    assert (await engine.wait_failed()).exit_code == 72


@pytest.mark.parametrize(("error", "code"), [("oom", 71), ("does_not_fit", 72), ("not_found", 66), ("bug", 70)])
async def test_failed_load_has_its_exit_code(kit: EngineKit, error: str, code: int) -> None:
    engine = await kit.start(FakeModelLoader(load_error=error), wait_ready=False)
    assert (await engine.wait_failed()).exit_code == code
    assert engine.state is EngineState.FAILED


async def test_requests_while_loading_are_unavailable(kit: EngineKit, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    engine = await kit.start(FakeModelLoader(load_gate=gate), wait_ready=False)
    assert (engine.state, engine.is_alive, engine.is_ready) == (EngineState.LOADING, True, False)
    with pytest.raises(UnavailableError, match="loading"):
        engine.generate([kit.request("a")])
    gate.touch()
    await kit.until(lambda: engine.is_ready)


async def test_stopped_engine_leaves_no_child(kit: EngineKit) -> None:
    engine = await kit.start(FakeModelLoader(step_s=0.01))
    pid = engine.child_pid
    stream = engine.generate([kit.request("a", max_tokens=100, ignore_eos=True)])
    await engine.stop()
    with pytest.raises(RequestAbortedError):
        await read_all(stream)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
