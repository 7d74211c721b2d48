"""Doubles and builders for tests and load tools; nothing in the product imports them.

FakeModelRunner makes wrong scheduling visible: it keeps a KV memory of token ids, and the next token is a function of
the history that it reads back through the block table. A wrong slot, a missing token, a block given to two sequences
or a stale prefix changes the output; compute_expected_tokens() says what it should have been.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterable

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import NULL_BLOCK, RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import (
    ModelRunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
)
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings

POISON = TokenId(-1)
MAX_PLANS_KEPT = 4096


def compute_next_token(history: Iterable[int], *, vocab_size: int) -> TokenId:
    """The fake model: a pure function of all tokens so far."""
    tokens = tuple(history)
    return TokenId(zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens)) % vocab_size)


def compute_expected_tokens(request: GenerationRequest, *, vocab_size: int = 1000) -> tuple[TokenId, ...]:
    """What the fake generates for a request that is alone, stop tokens and max_tokens heeded."""
    history = list(request.prompt_token_ids)
    output: list[TokenId] = []
    while len(output) < request.sampling.max_tokens:
        token = compute_next_token(history, vocab_size=vocab_size)
        history.append(token)
        output.append(token)
        if token in request.sampling.stop_token_ids and not request.sampling.ignore_eos:
            break
    return tuple(output)


class FakeModelRunner:
    """A ModelRunner whose KV memory holds token ids. Keeps the plans that it ran."""

    def __init__(self, *, block_size: int = 16, vocab_size: int = 1000) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._memory: dict[int, TokenId] = {}
        self.failures: deque[Exception | None] = deque()
        """One entry per coming step: an error to raise, or None to run. Empty: all run."""
        self.plans: deque[SchedulerOutput] = deque(maxlen=MAX_PLANS_KEPT)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            # A real step that fails may have written anything to the slots that it was given.
            for scheduled in plan.scheduled:
                self._write(scheduled, (POISON,) * len(scheduled.token_ids))
            raise failure
        for scheduled in plan.scheduled:
            self._write(scheduled, scheduled.token_ids)
        sampled = {
            scheduled.request_id: compute_next_token(self._read(scheduled), vocab_size=self._vocab_size)
            for scheduled in plan.scheduled
            if scheduled.samples
        }
        self.plans.append(plan)
        return ModelRunnerOutput(sampled)

    def _slot(self, scheduled: ScheduledSequence, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        block_id = scheduled.block_ids[block]
        assert block_id != NULL_BLOCK, f"{scheduled.request_id} has position {position} in the null block"
        return block_id * self._block_size + offset

    def _write(self, scheduled: ScheduledSequence, token_ids: tuple[TokenId, ...]) -> None:
        for position, token_id in enumerate(token_ids, start=scheduled.start_position):
            self._memory[self._slot(scheduled, position)] = token_id

    def _read(self, scheduled: ScheduledSequence) -> list[TokenId]:
        return [self._memory[self._slot(scheduled, position)] for position in range(scheduled.end_position)]


class OutputCollector:
    """What became of each request; complains about news after the end."""

    def __init__(self) -> None:
        self.token_ids: dict[RequestId, tuple[TokenId, ...]] = {}
        self.final: dict[RequestId, SequenceOutput] = {}

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.final, f"{output.request_id} has news after its end"
            self.token_ids[output.request_id] = self.token_ids.get(output.request_id, ()) + output.new_token_ids
            if output.finish_reason is not None:
                self.final[output.request_id] = output

    def run(self, engine: EngineCore, *, max_steps: int = 5000) -> None:
        """Step until the engine is idle, with its invariants checked after each step."""
        for _ in range(max_steps):
            if not engine.has_work:
                return
            self.take(engine.step())
            engine.check_invariants()
        raise AssertionError(f"the engine still has work after {max_steps} steps")


class ManualClock:
    """A Clock that moves when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def make_request(
    request_id: str = "r",
    prompt: Iterable[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    seed: int = 0,
    choice: int = 0,
    cache_salt: str = "",
) -> GenerationRequest:
    """A greedy request."""
    return GenerationRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(TokenId(token) for token in prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            seed=seed,
            stop_token_ids=frozenset(TokenId(token) for token in stop_token_ids),
            ignore_eos=ignore_eos,
        ),
        choice=choice,
        cache_salt=cache_salt,
    )


def make_sequence(request: GenerationRequest | None = None, *, arrival: int = 0, block_size: int = 16) -> Sequence:
    """A waiting sequence."""
    return Sequence(request or make_request(), arrival=arrival, block_size=block_size)


def make_engine_core(
    runner: FakeModelRunner | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 1024,
    max_queue_len: int = 256,
    model: str = "fake",
) -> EngineCore:
    """An EngineCore over the fake."""
    return EngineCore(
        runner or FakeModelRunner(block_size=block_size),
        num_blocks=num_blocks,
        cache=CacheSettings(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_queue_len=max_queue_len,
        ),
        model=model,
    )
