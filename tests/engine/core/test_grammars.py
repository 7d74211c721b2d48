"""Grammars in the core: refused at the door, followed by commits only, and the end when nothing may follow."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import FinishReason, ModelRunnerOutput, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import DeviceOutOfMemoryError, InvalidRequestError, OOMCause, OOMPhase
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_tokens,
    make_engine_core,
    make_grammar,
    make_request,
)

RESIDUES = (3, 1, 4, 1, 5)
GRAMMAR = make_grammar(7, RESIDUES)


def run(engine: EngineCore) -> OutputCollector:
    collector = OutputCollector()
    collector.run(engine)
    return collector


def test_an_output_follows_its_grammar_and_ends_when_it_is_complete() -> None:
    engine = make_engine_core()
    request = make_request("a", range(9), max_tokens=50, grammar=GRAMMAR)
    free = make_request("b", range(9), max_tokens=8)
    engine.add_request(request)
    engine.add_request(free)
    collector = run(engine)
    assert [token % 7 for token in collector.token_ids[request.request_id]] == list(RESIDUES)
    assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
    assert collector.final[request.request_id].finish_reason is FinishReason.STOP
    assert collector.token_ids[free.request_id] == compute_expected_tokens(free)


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, FinishReason.STOP), (4, FinishReason.LENGTH)])
def test_a_grammar_that_is_complete_with_the_last_token_allowed_stops(max_tokens: int, reason: FinishReason) -> None:
    engine = make_engine_core()
    engine.add_request(make_request("a", max_tokens=max_tokens, grammar=GRAMMAR))
    assert run(engine).final[RequestId("a")].finish_reason is reason


def test_a_grammar_that_can_not_be_followed_is_refused_and_takes_no_place() -> None:
    engine = make_engine_core(max_queue_len=1)
    with pytest.raises(InvalidRequestError, match="grammar is") as caught:
        engine.add_request(make_request("a", grammar=GrammarSpec(GrammarKind.REGEX, "no number: 1")))
    assert caught.value.param == "response_format"
    engine.add_request(make_request("a"))


def test_a_grammar_is_refused_where_the_model_is_served_without_structured_output() -> None:
    engine = EngineCore(
        FakeModelRunner(),
        num_blocks=8,
        cache=CacheSettings(),
        scheduler=SchedulerSettings(max_model_len=64),
        model="fake",
    )
    with pytest.raises(InvalidRequestError, match="without structured output"):
        engine.add_request(make_request(grammar=GRAMMAR))


def test_a_dropped_step_leaves_the_grammar_where_it_was() -> None:
    runner = FakeModelRunner()
    engine = make_engine_core(runner)
    request = make_request("a", range(9), max_tokens=50, grammar=GRAMMAR)
    engine.add_request(request)
    collector = OutputCollector()
    for _ in range(4):
        runner.failures.append(DeviceOutOfMemoryError("no memory", phase=OOMPhase.DECODE, cause=OOMCause.OWN))
        with pytest.raises(DeviceOutOfMemoryError):
            engine.step()
        collector.take(engine.step())
    collector.run(engine)
    assert collector.token_ids[request.request_id] == compute_expected_tokens(request)


def test_a_preempted_sequence_goes_on_in_its_grammar() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, num_blocks=7, block_size=4, max_model_len=28)
    requests = [
        make_request(name, range(first, first + 7), max_tokens=20, grammar=make_grammar(20, range(20)))
        for name, first in (("a", 0), ("b", 50))
    ]
    for request in requests:
        engine.add_request(request)
    collector = run(engine)
    assert engine.stats().num_preemptions_total > 0
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)


class DisobedientRunner(FakeModelRunner):
    """Samples what no grammar allows, for one request."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(plan)
        return ModelRunnerOutput({**result.sampled, RequestId("a"): TokenId(700)})


def test_a_token_against_the_grammar_ends_that_sequence_alone() -> None:
    engine = make_engine_core(DisobedientRunner())
    engine.add_request(make_request("a", grammar=GRAMMAR))
    other = make_request("b", grammar=GRAMMAR, max_tokens=9)
    engine.add_request(other)
    collector = run(engine)
    final = collector.final[RequestId("a")]
    assert (final.finish_reason, final.message) == (FinishReason.ERROR, "the grammar does not allow token 700")
    assert final.num_output_tokens == len(collector.token_ids[RequestId("a")])
    assert collector.token_ids[other.request_id] == compute_expected_tokens(other)


def test_a_grammar_that_leads_nowhere_ends_its_sequence_and_no_other() -> None:
    engine = make_engine_core()
    engine.add_request(make_request("a", grammar=make_grammar(7, ())))
    other = make_request("b")
    engine.add_request(other)
    collector = run(engine)
    assert collector.final[RequestId("a")].finish_reason is FinishReason.ERROR
    assert collector.final[RequestId("a")].message == "the grammar is complete and allows no token"
    assert collector.token_ids[other.request_id] == compute_expected_tokens(other)
    assert engine.stats().num_blocks_used == 0
