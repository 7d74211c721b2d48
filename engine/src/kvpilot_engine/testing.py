"""Doubles and builders for tests and load tools; nothing in the product imports them.

FakeModelRunner makes wrong scheduling visible: it keeps a KV memory of token ids, and the next token is a function of
the history that it reads back through the block table. A wrong slot, a missing token, a block given to two sequences
or a stale prefix changes the output; compute_expected_tokens() says what it should have been. It also heeds the
sampling fields that scheduling has a part in: min_tokens, grammars, log-probabilities, and history where it is needed.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.grammar import GrammarKind, GrammarSpec, TokenConstraint, TokenMask
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
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.errors import InvalidRequestError, ModelExecutionError

POISON = TokenId(-1)
MAX_PLANS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class FakeMask(TokenMask):
    """Allows the tokens that leave `residue` when divided by `modulus`."""

    modulus: int
    residue: int


class FakeConstraint(TokenConstraint):
    """A grammar of residues: token i of the output must leave residues[i]; after the last one it is complete."""

    def __init__(self, modulus: int, residues: tuple[int, ...]) -> None:
        self._modulus = modulus
        self._residues = residues
        self._num_accepted = 0

    def compute_mask(self) -> FakeMask:
        if self.is_complete:
            raise ModelExecutionError("the grammar is complete and allows no token")
        return FakeMask(self._modulus, self._residues[self._num_accepted])

    def accept(self, token_id: TokenId) -> None:
        if self.is_complete or token_id % self._modulus != self._residues[self._num_accepted]:
            raise ModelExecutionError(f"the grammar does not allow token {token_id}")
        self._num_accepted += 1

    @property
    def is_complete(self) -> bool:
        return self._num_accepted == len(self._residues)


class FakeConstraintCompiler:
    """Reads `modulus: residue residue …`, as make_grammar() writes it."""

    def compile(self, grammar: GrammarSpec) -> FakeConstraint:
        modulus, _, residues = grammar.text.partition(":")
        try:
            return FakeConstraint(int(modulus), tuple(int(residue) for residue in residues.split()))
        except ValueError as error:
            raise InvalidRequestError(f"grammar is {grammar.text!r}: {error}", param="response_format") from error


def make_grammar(modulus: int, residues: Iterable[int]) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, f"{modulus}: {' '.join(str(residue) for residue in residues)}")


def compute_next_token(history: Iterable[int], *, vocab_size: int) -> TokenId:
    """The fake model: a pure function of all tokens so far."""
    tokens = tuple(history)
    return TokenId(zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens)) % vocab_size)


def compute_sample(
    history: Iterable[int], sampling: SamplingParams, *, num_output_tokens: int, mask: TokenMask | None, vocab_size: int
) -> TokenId:
    """The fake sampler: the model's token, or the next one round the vocabulary that may be sampled."""
    first = compute_next_token(history, vocab_size=vocab_size)
    for token in (TokenId(i % vocab_size) for i in range(first, first + vocab_size)):
        if isinstance(mask, FakeMask) and token % mask.modulus != mask.residue:
            continue
        if num_output_tokens < sampling.min_tokens and token in sampling.stop_token_ids:
            continue
        return token
    raise AssertionError("the mask allows no token")


def compute_logprobs(history: Iterable[int], token_id: TokenId, num_top: int, *, vocab_size: int) -> TokenLogprobs:
    """The fake's log-probabilities for the token after `history`: a pure function of both."""
    model_token = compute_next_token(history, vocab_size=vocab_size)
    top = tuple((TokenId((model_token + i) % vocab_size), -1.0 - i) for i in range(num_top))
    distance = (token_id - model_token) % vocab_size
    return TokenLogprobs(token_id, -1.0 - distance, distance + 1, top)


def compute_expected_tokens(
    request: GenerationRequest, *, vocab_size: int = 1000, window: int | None = None
) -> tuple[TokenId, ...]:
    """What the fake generates for a request that is alone: stop tokens, lengths and the grammar heeded."""
    sampling = request.sampling
    constraint = None if request.grammar is None else FakeConstraintCompiler().compile(request.grammar)
    history = list(request.prompt_token_ids)
    output: list[TokenId] = []
    while len(output) < sampling.max_tokens:
        mask = None if constraint is None else constraint.compute_mask()
        seen = history if window is None else history[-window:]
        token = compute_sample(seen, sampling, num_output_tokens=len(output), mask=mask, vocab_size=vocab_size)
        history.append(token)
        output.append(token)
        if token in sampling.stop_token_ids and not sampling.ignore_eos and len(output) > sampling.min_tokens:
            break
        if constraint is not None:
            constraint.accept(token)
            if constraint.is_complete:
                break
    return tuple(output)


def compute_expected_logprobs(
    request: GenerationRequest, *, vocab_size: int = 1000, window: int | None = None
) -> tuple[TokenLogprobs, ...]:
    """Those of the prompt's tokens but the first, then those of the output's, each as far as they are asked for."""
    tokens = request.prompt_token_ids + compute_expected_tokens(request, vocab_size=vocab_size, window=window)
    num_prompt_tokens = len(request.prompt_token_ids)
    wanted = [request.sampling.prompt_logprobs] * num_prompt_tokens
    wanted += [request.sampling.logprobs] * (len(tokens) - num_prompt_tokens)
    return tuple(
        compute_logprobs(
            tokens[0 if window is None else max(0, index - window) : index],
            tokens[index],
            num_top,
            vocab_size=vocab_size,
        )
        for index, num_top in enumerate(wanted)
        if index and num_top is not None
    )


class FakeModelRunner:
    """A ModelRunner whose KV memory holds token ids. Keeps the plans that it ran.

    With a `window` the next token is a function of that many last tokens only.
    """

    def __init__(self, *, block_size: int = 16, vocab_size: int = 1000, window: int | None = None) -> None:
        self._window = window
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._memory: dict[int, TokenId] = {}
        self.failures: deque[Exception | None] = deque()
        """One entry per coming step: an error to raise, or None to run. Empty: all run."""
        self.unusable: set[RequestId] = set()
        """Sequences whose logits are not finite."""
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
        sampled: dict[RequestId, TokenId] = {}
        logprobs: dict[RequestId, TokenLogprobs] = {}
        prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        failed: dict[RequestId, str] = {}
        for scheduled in plan.scheduled:
            request_id = scheduled.request_id
            if request_id in self.unusable:
                failed[request_id] = "the logits are not finite"
                continue
            if scheduled.prompt_targets:
                prompt_logprobs[request_id] = self._score(scheduled)
            if scheduled.samples:
                sampled[request_id], logprob = self._sample(scheduled)
                if logprob is not None:
                    logprobs[request_id] = logprob
        self.plans.append(plan)
        return ModelRunnerOutput(sampled, logprobs, prompt_logprobs, failed)

    def _sample(self, scheduled: ScheduledSequence) -> tuple[TokenId, TokenLogprobs | None]:
        sampling = scheduled.sampling
        tokens = self._read(scheduled, scheduled.end_position)
        assert scheduled.end_position == scheduled.num_prompt_tokens + scheduled.num_output_tokens
        assert len(scheduled.history) == (scheduled.end_position if sampling.needs_history else 0)
        assert not sampling.needs_history or scheduled.history[-len(tokens) :] == tuple(tokens)
        token_id = compute_sample(
            tokens,
            sampling,
            num_output_tokens=scheduled.num_output_tokens,
            mask=scheduled.token_mask,
            vocab_size=self._vocab_size,
        )
        if sampling.logprobs is None:
            return token_id, None
        return token_id, compute_logprobs(tokens, token_id, sampling.logprobs, vocab_size=self._vocab_size)

    def _score(self, scheduled: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        num_top = scheduled.sampling.prompt_logprobs
        assert num_top is not None, f"{scheduled.request_id} has targets and wants no log-probabilities"
        return tuple(
            compute_logprobs(self._read(scheduled, end), target, num_top, vocab_size=self._vocab_size)
            for end, target in enumerate(scheduled.prompt_targets, start=scheduled.start_position + 1)
        )

    def _slot(self, scheduled: ScheduledSequence, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        block_id = scheduled.block_ids[block]
        assert block_id != NULL_BLOCK, f"{scheduled.request_id} has position {position} in the null block"
        return block_id * self._block_size + offset

    def _write(self, scheduled: ScheduledSequence, token_ids: tuple[TokenId, ...]) -> None:
        for position, token_id in enumerate(token_ids, start=scheduled.start_position):
            self._memory[self._slot(scheduled, position)] = token_id

    def _read(self, scheduled: ScheduledSequence, end: int) -> list[TokenId]:
        """What the token before position `end` sees."""
        start = 0 if self._window is None else max(0, end - self._window)
        return [self._memory[self._slot(scheduled, position)] for position in range(start, end)]


class OutputCollector:
    """What became of each request; complains about news after the end."""

    def __init__(self) -> None:
        self.token_ids: dict[RequestId, tuple[TokenId, ...]] = {}
        self.logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        """The prompt's, then the output's."""
        self.final: dict[RequestId, SequenceOutput] = {}

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.final, f"{output.request_id} has news after its end"
            self.token_ids[output.request_id] = self.token_ids.get(output.request_id, ()) + output.new_token_ids
            known = self.logprobs.get(output.request_id, ())
            self.logprobs[output.request_id] = known + output.prompt_logprobs + output.logprobs
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
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    choice: int = 0,
    priority: int = 0,
    grammar: GrammarSpec | None = None,
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
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            repetition_penalty=repetition_penalty,
        ),
        choice=choice,
        priority=priority,
        grammar=grammar,
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
    window: int | None = None,
    preempt_every: int = 0,
    model: str = "fake",
) -> EngineCore:
    """An EngineCore over the fake."""
    return EngineCore(
        runner or FakeModelRunner(block_size=block_size, window=window),
        num_blocks=num_blocks,
        cache=CacheSettings(block_size=block_size, enable_prefix_caching=enable_prefix_caching, window=window),
        scheduler=SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_queue_len=max_queue_len,
            preempt_every=preempt_every,
        ),
        model=model,
        constraints=FakeConstraintCompiler(),
    )
