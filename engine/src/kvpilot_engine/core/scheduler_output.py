"""What crosses from the scheduler to the model runner and back. Plain, frozen, picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvpilot_engine.core.grammar import TokenMask
from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.token_logprobs import TokenLogprobs


class FinishReason(StrEnum):
    """Why a sequence ended; each admitted request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence that this step computes.

    positions  0 ........ start_position ........ start_position + len(token_ids)
               └ already in the cache ┘└ computed and written in this step ┘
    """

    request_id: RequestId
    start_position: int
    token_ids: tuple[TokenId, ...]
    """The tokens to compute, never empty; their positions start at start_position."""
    block_ids: tuple[BlockId, ...]
    """The whole block table: position p lives in block_ids[p // block_size] at slot p % block_size."""
    sampling: SamplingParams
    choice: int
    samples: bool
    """True when the last of token_ids is the last known token, so that this step yields the next one."""
    history: tuple[TokenId, ...] = ()
    """All tokens of the sequence when sampling.needs_history and samples; else empty."""
    num_prompt_tokens: int = 0
    """How many of the sequence's tokens are its prompt."""
    num_output_tokens: int = 0
    """How many were generated before this step."""
    token_mask: TokenMask | None = None
    """The tokens that its grammar allows next; None: all."""
    prompt_targets: tuple[TokenId, ...] = ()
    """The prompt tokens that follow the first len(prompt_targets) of token_ids, when their log-probabilities are
    wanted (sampling.prompt_logprobs) and were not reported before; else empty."""

    @property
    def end_position(self) -> int:
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence gave its blocks up for another and waits again."""

    request_id: RequestId
    num_lost_tokens: int
    """Computed tokens that it gave up; what the prefix cache still holds when it returns is not computed again."""
    num_preemptions: int
    """How often this sequence was preempted, this time included."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan. Planning only reserves blocks; nothing is committed until the result is."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Preemption, ...] = ()
    rejected: tuple[SequenceOutput, ...] = ()
    """Sequences that can't go on and end in this step without being run."""

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The sampled token of each scheduled sequence with samples=True, and the log-probabilities that were asked for."""

    sampled: Mapping[RequestId, TokenId]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    """Of the sampled tokens, for sequences with sampling.logprobs."""
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """One entry per prompt target."""
    failed: Mapping[RequestId, str] = field(default_factory=dict)
    """Sequences whose own logits are unusable (not finite), with the reason: they end, the others go on."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """News of one sequence after a step; the one with a finish_reason is its last."""

    request_id: RequestId
    new_token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    num_output_tokens: int = 0
    message: str = ""
    """For people, when finish_reason is ERROR."""
    is_refusal: bool = False
    """With ERROR: the request itself is to blame, not the engine."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token, when they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """News of the prompt's log-probabilities in order; all of them, joined, are one per prompt token but the first."""
