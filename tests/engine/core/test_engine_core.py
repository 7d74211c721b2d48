"""EngineCore: the door, results equal to the run alone, failures that lose nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    InvalidRequestError,
    ModelExecutionError,
    NeverFitsError,
    OOMCause,
    OOMPhase,
    OverloadedError,
)
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_tokens,
    make_engine_core,
    make_request,
)


def add_all(engine: EngineCore, requests: list[GenerationRequest]) -> None:
    for request in requests:
        engine.add_request(request)


def run(engine: EngineCore) -> OutputCollector:
    collector = OutputCollector()
    collector.run(engine)
    return collector


def make_oom() -> DeviceOutOfMemoryError:
    return DeviceOutOfMemoryError("no memory", phase=OOMPhase.DECODE, cause=OOMCause.OWN)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "numbers"),
    [
        (100, 1, "prompt", ("100", "64")),
        (40, 80, "max_tokens", ("120", "64")),
        (128, 1, "prompt", ("128", "128")),
        (64, 1, "prompt", ("64", "64")),
        (40, 25, "max_tokens", ("65", "64")),
    ],
)
def test_never_fit_request_is_refused(prompt: int, max_tokens: int, param: str, numbers: tuple[str, str]) -> None:  # A2
    """A cache of 64 tokens under a length limit of 128: the request would wait for ever, and all others behind it."""
    engine = make_engine_core(num_blocks=4, block_size=16, max_model_len=128)
    with pytest.raises(NeverFitsError) as caught:
        engine.add_request(make_request("never", range(prompt), max_tokens=max_tokens, ignore_eos=True))
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers)
    small = make_request("small", range(5))
    engine.add_request(small)
    assert run(engine).token_ids[small.request_id] == compute_expected_tokens(small)


def test_a_request_that_fills_the_cache_exactly_is_served() -> None:  # A2
    engine = make_engine_core(num_blocks=4, block_size=16, max_model_len=64)
    request = make_request("full", range(40), max_tokens=24)
    engine.add_request(request)
    assert run(engine).token_ids[request.request_id] == compute_expected_tokens(request)


def test_a_full_queue_refuses_one_more() -> None:
    engine = make_engine_core(max_queue_len=2)
    add_all(engine, [make_request("a"), make_request("b")])
    with pytest.raises(OverloadedError, match=r"2 requests are waiting; max_queue_len is 2") as caught:
        engine.add_request(make_request("c"))
    assert caught.value.retry_after_s > 0
    engine.step()
    engine.add_request(make_request("c"))


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = make_engine_core()
    engine.add_request(make_request("a"))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request(make_request("a"))
    engine.abort(RequestId("a"))
    engine.add_request(make_request("a"))


def test_usage_numbers_come_with_the_news() -> None:
    engine = make_engine_core(block_size=4)
    request = make_request("a", range(9), max_tokens=2)
    engine.add_request(request)
    run(engine)
    again = make_request("b", range(9), max_tokens=2)
    engine.add_request(again)
    final = run(engine).final[again.request_id]
    assert (final.num_prompt_tokens, final.num_cached_tokens, final.num_output_tokens) == (9, 8, 2)
    assert final.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_and_is_the_last_token() -> None:
    whole = compute_expected_tokens(make_request(max_tokens=10))
    request = make_request(max_tokens=10, stop_token_ids=(whole[4],))
    engine = make_engine_core()
    engine.add_request(request)
    collector = run(engine)
    assert collector.token_ids[request.request_id] == whole[:5]
    assert collector.final[request.request_id].finish_reason is FinishReason.STOP


def test_a_prompt_of_whole_blocks_sent_again_gives_the_same_tokens() -> None:  # A8
    engine = make_engine_core(block_size=4)
    cached = []
    for request_id, length in (("first", 8), ("second", 8), ("longer", 9)):
        request = make_request(request_id, range(length))
        engine.add_request(request)
        collector = run(engine)
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
        cached.append(collector.final[request.request_id].num_cached_tokens)
    assert cached == [0, 4, 8]


@pytest.mark.parametrize("budget", [8, 512])
def test_choices_of_one_request_share_their_prompt(budget: int) -> None:  # A5
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, block_size=4, max_num_batched_tokens=budget)
    requests = [make_request(f"r{i}", range(41), max_tokens=3, choice=i) for i in range(4)]
    add_all(engine, requests)
    collector = run(engine)
    assert all(collector.token_ids[r.request_id] == compute_expected_tokens(r) for r in requests)
    assert [collector.final[r.request_id].num_cached_tokens for r in requests] == [0, 40, 40, 40]
    assert sum(plan.num_tokens for plan in runner.plans) == 41 + 3 * 1 + 4 * 2


@pytest.mark.parametrize(("salt", "cached"), [("alice", 8), ("bob", 0)])
def test_another_salt_never_hits(salt: str, cached: int) -> None:  # A12
    engine = make_engine_core(block_size=4)
    engine.add_request(make_request("victim", range(9), cache_salt="alice"))
    run(engine)
    engine.add_request(make_request("probe", range(9), cache_salt=salt))
    assert run(engine).final[RequestId("probe")].num_cached_tokens == cached


@pytest.mark.parametrize("caching", [True, False])
def test_short_requests_beside_a_long_one_and_resent_after_a_cancel_give_their_own_tokens(caching: bool) -> None:  # A6
    engine = make_engine_core(
        num_blocks=24, block_size=4, max_model_len=96, max_num_batched_tokens=16, enable_prefix_caching=caching
    )
    collector = OutputCollector()
    requests = []
    for burst in range(10):
        requests += [make_request(f"short{burst}.{i}", range(i, i + 5), max_tokens=12) for i in range(4)]
        requests.append(make_request(f"long{burst}", range(50), max_tokens=30))
        doomed = [make_request(f"doomed{burst}.{i}", range(i, i + 7), max_tokens=20) for i in range(5)]
        add_all(engine, requests[-5:] + doomed)
        for _ in range(6):
            collector.take(engine.step())
            engine.check_invariants()
        for request in doomed:
            output = engine.abort(request.request_id)
            assert output is not None
            collector.take([output])
            resent = make_request(f"re{request.request_id}", request.prompt_token_ids, max_tokens=20)
            requests.append(resent)
            engine.add_request(resent)
            engine.check_invariants()
    collector.run(engine)
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "prompt", "output"), [(100, 320, 320), (25, 100, 60), (25, 20, 140)])
def test_preemptions_of_a_request_are_bounded(caching: bool, num_blocks: int, prompt: int, output: int) -> None:  # A4
    """Eight long requests at once in a cache that holds two and a half of them."""
    runner = FakeModelRunner()
    engine = make_engine_core(
        runner,
        num_blocks=num_blocks,
        max_model_len=num_blocks * 16,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
    )
    requests = [make_request(f"r{i}", range(i, i + prompt), max_tokens=output) for i in range(8)]
    add_all(engine, requests)
    collector = run(engine)
    assert all(collector.token_ids[r.request_id] == compute_expected_tokens(r) for r in requests)
    preemptions = Counter(preemption.request_id for plan in runner.plans for preemption in plan.preempted)
    assert max(preemptions.values(), default=0) <= 5
    assert engine.stats().num_preemptions_total == preemptions.total() > 0


def test_a_failed_step_ends_those_it_ran_and_no_others() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, block_size=4, max_num_seqs=2)
    requests = [make_request(name, range(9)) for name in ("a", "b", "c")]
    add_all(engine, requests)
    runner.failures.extend([None, ModelExecutionError("kernel failed")])
    collector = run(engine)
    assert {request_id: output.finish_reason for request_id, output in collector.final.items()} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }
    assert collector.final[RequestId("a")].message == "kernel failed"
    assert collector.token_ids[RequestId("c")] == compute_expected_tokens(requests[2])
    assert engine.stats().finished_total == {"stop": 0, "length": 1, "abort": 0, "error": 2}
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize("failing_step", range(6))
def test_a_device_oom_loses_no_request(failing_step: int) -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(
        runner, num_blocks=12, block_size=4, max_model_len=48, max_num_batched_tokens=8, max_num_seqs=3
    )
    requests = [make_request(f"r{i}", range(9), max_tokens=8) for i in range(4)]
    add_all(engine, requests)
    runner.failures.extend([None] * failing_step + [make_oom(), make_oom()])
    collector = OutputCollector()
    for _ in range(failing_step):
        collector.take(engine.step())
    for _ in range(2):
        before = engine.stats()
        with pytest.raises(DeviceOutOfMemoryError):
            engine.step()
        engine.check_invariants()
        assert engine.stats().num_blocks_used == before.num_blocks_used
        assert engine.stats().num_steps_total == before.num_steps_total
    collector.run(engine)
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)


def test_the_end_of_a_sequence_survives_the_failure_of_the_step_that_rejected_it() -> None:
    runner = FakeModelRunner()
    engine = make_engine_core(runner, num_blocks=8)
    add_all(engine, [make_request("big", range(100)), make_request("small")])
    engine._kv_cache.pool.set_target(2)
    runner.failures.append(make_oom())
    with pytest.raises(DeviceOutOfMemoryError):
        engine.step()
    collector = run(engine)
    assert collector.final[RequestId("big")].finish_reason is FinishReason.ERROR
    assert collector.final[RequestId("small")].finish_reason is FinishReason.LENGTH


def test_an_abort_ends_exactly_once() -> None:
    engine = make_engine_core()
    engine.add_request(make_request("a", max_tokens=50))
    engine.step()
    output = engine.abort(RequestId("a"), FinishReason.STOP)
    assert output is not None
    assert (output.finish_reason, output.num_output_tokens) == (FinishReason.STOP, 1)
    assert engine.abort(RequestId("a")) is None
    assert not engine.has_work
