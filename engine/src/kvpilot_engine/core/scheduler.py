"""What the next step computes, and what its result means. There are no phases: tokens are computed until none is left.

Planning only reserves: schedule() hands out blocks and places. update_from_output() alone moves computed counts,
appends tokens and publishes prefixes; drop() takes the reservation back. One plan is open at a time.
Preemptions and evictions of a dropped plan stay: a failed step may have overwritten those blocks.

One step, under one token budget:
    running sequences, in order of admission     each its next token, or the next chunk of its prompt
    waiting ones, by priority and arrival        while budget, places and blocks last; none overtakes another,
                                                 and all wait a moment for a prefix that is just being computed

Invariant: with work to do, a step schedules something or rejects something.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpilot_engine.core.admission import ReserveRule, compute_reserve
from kvpilot_engine.core.block_size_advice import BlockSizeAdvisor
from kvpilot_engine.core.counters import Counters
from kvpilot_engine.core.grammar import TokenConstraint, TokenMask
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.kv_cache_manager import KVCacheManager, PrefixMatch
from kvpilot_engine.core.preemption import VictimRule, choose_victim
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.reservation import Reservation, check_complete, count_next_tokens
from kvpilot_engine.core.scheduler_output import (
    FinishReason,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
    SequenceOutput,
)
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.core.stopping import check_stop
from kvpilot_engine.core.waiting_queue import WaitingQueue
from kvpilot_engine.errors import GrammarTooComplexError, ModelExecutionError


@dataclass(slots=True)
class _Planning:
    """A plan while it is made."""

    num_tokens_left: int
    reservations: dict[RequestId, Reservation] = field(default_factory=dict)
    preempted: list[Preemption] = field(default_factory=list)
    rejected: list[SequenceOutput] = field(default_factory=list)


class Scheduler:
    """Owns all live sequences."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv_cache: KVCacheManager,
        *,
        reserve_rule: ReserveRule = compute_reserve,
        victim_rule: VictimRule = choose_victim,
    ) -> None:
        """The rules are arguments for simulations that compare them."""
        self._settings = settings
        self._reserve_rule = reserve_rule
        self._victim_rule = victim_rule
        self._kv_cache = kv_cache
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: dict[RequestId, Sequence] = {}
        """In order of admission: who came back last computes its prompt after the others' next tokens."""
        self._num_arrived = 0
        self._num_planned = 0
        self._open_plan: SchedulerOutput | None = None
        self._reservations: tuple[Reservation, ...] = ()
        self.counters = Counters()
        self.block_size_advisor = BlockSizeAdvisor(kv_cache.block_size)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_swapped_out(self) -> int:
        return self._waiting.num_swapped_out

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, request: GenerationRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request that the caller has checked to fit. `constraint`: its grammar, at the beginning."""
        assert request.request_id not in self._sequences
        sequence = Sequence(
            request, arrival=self._num_arrived, block_size=self._kv_cache.block_size, constraint=constraint
        )
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)

    def finish(self, request_id: RequestId, reason: FinishReason, message: str = "") -> SequenceOutput | None:
        """End a sequence now, whatever its status; its last output, or None when there is no such sequence.

        Also legal while a plan is open: the result of the step is then ignored for it.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, reason)
        self._kv_cache.pool.hold_out_due()
        return sequence.build_output((), message)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. A plan that schedules anything stays open until update_from_output() or drop()."""
        assert self._open_plan is None, "the last plan was neither committed nor dropped"
        planning = _Planning(self._settings.max_num_batched_tokens)
        self._preempt_for_test(planning)
        self._plan_running(planning)
        if not planning.preempted:
            # The preempted one is first in the queue now; a plan that takes its blocks must not bring it back.
            self._plan_waiting(planning)
        masks = self._compute_masks(planning)
        self._kv_cache.pool.hold_out_due()
        plan = SchedulerOutput(
            tuple(r.build_scheduled(masks.get(request_id)) for request_id, r in planning.reservations.items()),
            preempted=tuple(planning.preempted),
            rejected=tuple(planning.rejected),
        )
        assert plan.scheduled or plan.rejected or not self._sequences, "a step with work to do did nothing"
        if plan.scheduled:
            self._open_plan = plan
            self._reservations = tuple(planning.reservations.values())
        return plan

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Commit an executed plan; news of every sequence that got a token, or log-probabilities of its prompt.

        Raises ModelExecutionError, with nothing committed and the plan still open, when part of the result is missing.
        """
        assert plan is self._open_plan, "this plan is not the open one"
        check_complete(plan, result)
        self._open_plan = None
        outputs = [
            output
            for reservation in self._reservations
            if not reservation.sequence.is_finished and (output := self._commit(reservation, result)) is not None
        ]
        self.counters.num_steps += 1
        self._kv_cache.pool.hold_out_due()
        return outputs

    def drop(self, plan: SchedulerOutput) -> None:
        """Take back all that an unexecuted or failed plan reserved; its sequences are as they were before it."""
        assert plan is self._open_plan, "this plan is not the open one"
        self._open_plan = None
        for reservation in self._reservations:
            sequence = reservation.sequence
            if sequence.is_finished:
                continue
            if reservation.num_blocks_before:
                self._kv_cache.cut_to(sequence, reservation.num_blocks_before)
            else:
                self._return_to_queue(sequence)
        self._kv_cache.pool.hold_out_due()

    def lacks_capacity(self) -> bool:
        """True when the first waiting sequence could not start now, however large the token budget. Pure."""
        first = self._waiting.first()
        if first is None:
            return False
        return len(self._running) >= self._settings.max_num_seqs or self._find_room(first) is None

    def check_invariants(self) -> None:
        """Assert that queues, tables and pool agree. For tests, after every step."""
        for sequence in self._sequences.values():
            assert not sequence.is_finished, f"{sequence.request_id} ended and is still here"
            assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.request_id} has nothing to compute"
            if sequence.request_id not in self._running:
                assert len(sequence.block_table) == 0, f"{sequence.request_id} waits with blocks"
        assert len(self._running) + len(self._waiting) == len(self._sequences)
        self._kv_cache.check_invariants(self._running.values())

    def _plan_running(self, planning: _Planning) -> None:
        for sequence in list(self._running.values()):
            if planning.num_tokens_left == 0:
                return
            if sequence.request_id not in self._running:
                continue  # preempted for one before it
            num_tokens = count_next_tokens(sequence, planning.num_tokens_left)
            num_blocks_before = len(sequence.block_table)
            if self._grow(sequence, num_tokens, planning):
                planning.reservations[sequence.request_id] = Reservation(sequence, num_tokens, num_blocks_before)
                planning.num_tokens_left -= num_tokens

    def _grow(self, sequence: Sequence, num_tokens: int, planning: _Planning) -> bool:
        """Reserve slots for num_tokens more tokens, at others' cost if need be. False: it sits this step out."""
        while self._kv_cache.allocate_slots(sequence, sequence.num_computed_tokens + num_tokens) is None:
            victim = self._victim_rule(self._running.values(), sequence)
            if victim is None:
                if len(self._running) == 1:
                    # It has the whole pool. Admission checks that the pool holds it to its end, so the pool has
                    # shrunk since then.
                    self._reject(sequence, planning)
                return False
            self._preempt(victim, planning)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, planning: _Planning) -> None:
        reservation = planning.reservations.pop(victim.request_id, None)
        if reservation is not None:
            planning.num_tokens_left += reservation.num_tokens
        victim.num_preemptions += 1
        self.counters.num_preemptions += 1
        planning.preempted.append(Preemption(victim.request_id, victim.num_computed_tokens, victim.num_preemptions))
        self._return_to_queue(victim)

    def _preempt_for_test(self, planning: _Planning) -> None:
        every = self._settings.preempt_every
        self._num_planned += 1
        if every and self._num_planned % every == 0 and self._running:
            victim = self._victim_rule(self._running.values(), min(self._running.values(), key=lambda s: s.place))
            if victim is not None:
                self._preempt(victim, planning)

    def _plan_waiting(self, planning: _Planning) -> None:
        while (sequence := self._waiting.first()) is not None:
            if self._kv_cache.num_blocks_to_hold(sequence.max_total_tokens) > self._kv_cache.pool.target_blocks:
                self._reject(sequence, planning)
                continue
            if planning.num_tokens_left == 0 or len(self._running) >= self._settings.max_num_seqs:
                return
            match = self._find_room(sequence)
            if match is None or self._kv_cache.will_be_cached(sequence, match):
                return
            self._waiting.remove(sequence)
            self._kv_cache.admit(sequence, match)
            self._running[sequence.request_id] = sequence
            num_tokens = count_next_tokens(sequence, planning.num_tokens_left)
            planning.reservations[sequence.request_id] = Reservation(sequence, num_tokens, 0)
            planning.num_tokens_left -= num_tokens

    def _find_room(self, sequence: Sequence) -> PrefixMatch | None:
        """The cached prefix to start a waiting sequence with, or None when its blocks and the reserve don't fit."""
        match = self._kv_cache.find_prefix(sequence)
        reserve = self._compute_reserve(sequence) if self._running else 0
        return match if self._kv_cache.can_admit(sequence, match, num_reserved_blocks=reserve) else None

    def _compute_reserve(self, candidate: Sequence) -> int:
        """Blocks to leave free so that those who run, and the candidate, can go on for a while."""
        blocks_for = self._kv_cache.num_blocks_to_hold
        num_outstanding = blocks_for(candidate.max_total_tokens) - blocks_for(candidate.num_tokens)
        for sequence in self._running.values():
            num_outstanding += blocks_for(sequence.max_total_tokens) - sequence.block_table.num_held
        return self._reserve_rule(len(self._running), num_outstanding)

    def _reject(self, sequence: Sequence, planning: _Planning) -> None:
        block_size = self._kv_cache.block_size
        num_needed = min(
            sequence.max_total_tokens, self._kv_cache.num_blocks_to_hold(sequence.max_total_tokens) * block_size
        )
        message = (
            f"the request needs room for {num_needed} tokens, "
            f"but the KV cache was shrunk and holds {self._kv_cache.pool.target_blocks * block_size}"
        )
        planning.rejected.append(self._fail(sequence, message))

    def _compute_masks(self, planning: _Planning) -> dict[RequestId, TokenMask]:
        """What the grammars of those who sample allow next. A sequence whose grammar leads nowhere ends."""
        masks: dict[RequestId, TokenMask] = {}
        for request_id, reservation in tuple(planning.reservations.items()):
            sequence = reservation.sequence
            if sequence.constraint is None or not reservation.samples:
                continue
            try:
                masks[request_id] = sequence.constraint.compute_mask()
            except ModelExecutionError as error:
                del planning.reservations[request_id]
                planning.rejected.append(self._fail(sequence, str(error), is_refusal=_is_refusal(error)))
        return masks

    def _commit(self, reservation: Reservation, result: ModelRunnerOutput) -> SequenceOutput | None:
        sequence = reservation.sequence
        request_id = sequence.request_id
        if request_id in result.failed:
            return self._fail(sequence, result.failed[request_id])
        self._count(sequence, reservation.num_tokens)
        self._kv_cache.commit(sequence, reservation.num_tokens)
        prompt_logprobs = result.prompt_logprobs.get(request_id, ())
        sequence.num_unscored_tokens -= len(prompt_logprobs)
        if sequence.num_computed_tokens < sequence.num_tokens:
            return sequence.build_output(prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        if not sequence.generates:
            self._end(sequence, FinishReason.LENGTH)
            return sequence.build_output(prompt_logprobs=prompt_logprobs)
        token_id = result.sampled[request_id]
        message, is_refusal = "", False
        try:
            reason = self._append(sequence, token_id)
        except ModelExecutionError as error:
            reason, message, is_refusal = FinishReason.ERROR, str(error), _is_refusal(error)
        if reason is not None:
            self._end(sequence, reason)
        logprobs = (result.logprobs[request_id],) if sequence.request.sampling.logprobs is not None else ()
        return sequence.build_output(
            (token_id,), message, is_refusal=is_refusal, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )

    def _append(self, sequence: Sequence, token_id: TokenId) -> FinishReason | None:
        """Take a sampled token; the reason to end after it. A grammar that is complete ends as a stop token does."""
        constraint = sequence.constraint
        sequence.append_token(token_id)
        self.counters.num_generation_tokens += 1
        reason = check_stop(sequence)
        if constraint is None or reason is FinishReason.STOP:
            return reason
        constraint.accept(token_id)
        return FinishReason.STOP if constraint.is_complete else reason

    def _fail(self, sequence: Sequence, message: str, *, is_refusal: bool = False) -> SequenceOutput:
        self._end(sequence, FinishReason.ERROR)
        return sequence.build_output((), message, is_refusal=is_refusal)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        if not sequence.is_counted:
            sequence.is_counted = True
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            if self._kv_cache.caches_prefixes and sequence.request.sampling.prompt_logprobs is None:
                self.counters.num_prefix_queries += sequence.num_prompt_tokens
                self.counters.num_prefix_hits += sequence.num_cached_tokens
        start = sequence.num_computed_tokens
        known = min(sequence.num_ever_computed_tokens, start + num_tokens)
        self.counters.num_recomputed_tokens += max(0, known - start)

    def _return_to_queue(self, sequence: Sequence) -> None:
        self._kv_cache.free(sequence)
        del self._running[sequence.request_id]
        sequence.return_to_queue()
        self._waiting.add(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._sequences[sequence.request_id]
        if self._running.pop(sequence.request_id, None) is None:
            self._waiting.remove(sequence)
        self._kv_cache.free(sequence)
        sequence.finish(reason)
        self.counters.finished[reason.value] += 1
        self.block_size_advisor.note(sequence.num_prompt_tokens, sequence.num_output_tokens)


def _is_refusal(error: ModelExecutionError) -> bool:
    """True when the sequence's own grammar is to blame."""
    return isinstance(error, GrammarTooComplexError)
