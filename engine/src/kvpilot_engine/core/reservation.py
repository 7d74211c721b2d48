"""What one sequence got in the open plan: how many of its tokens, and how that is told to the model runner.

Pure: reads the sequence, changes nothing. Not for deciding who gets something (scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.grammar import TokenMask
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.errors import ModelExecutionError


@dataclass(slots=True)
class Reservation:
    """`num_blocks_before` is 0 for a sequence that the plan admitted."""

    sequence: Sequence
    num_tokens: int
    num_blocks_before: int

    @property
    def samples(self) -> bool:
        """True when the step yields the sequence's next token."""
        sequence = self.sequence
        return sequence.generates and sequence.num_computed_tokens + self.num_tokens == sequence.num_tokens

    def build_scheduled(self, token_mask: TokenMask | None) -> ScheduledSequence:
        """The reservation as the runner gets it; `token_mask` comes from the sequence's grammar."""
        sequence = self.sequence
        sampling = sequence.request.sampling
        token_ids = sequence.token_ids
        start = sequence.num_computed_tokens
        end = start + self.num_tokens
        samples = self.samples
        targets_end = start
        if sequence.num_unscored_tokens and start >= sequence.num_scored_tokens:
            targets_end = min(end + 1, sequence.num_prompt_tokens)
        return ScheduledSequence(
            request_id=sequence.request_id,
            start_position=start,
            token_ids=tuple(token_ids[start:end]),
            block_ids=sequence.block_table.block_ids,
            sampling=sampling,
            choice=sequence.request.choice,
            samples=samples,
            history=tuple(token_ids) if samples and sampling.needs_history else (),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            token_mask=token_mask,
            prompt_targets=tuple(token_ids[start + 1 : targets_end]),
        )


def count_next_tokens(sequence: Sequence, num_tokens_left: int) -> int:
    """How many of its tokens a sequence computes in a step that has room for num_tokens_left."""
    num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, num_tokens_left)
    if sequence.num_unscored_tokens and sequence.num_computed_tokens < sequence.num_scored_tokens:
        # After a preemption: what was scored is computed again on its own, so that a step's targets have no gap.
        num_tokens = min(num_tokens, sequence.num_scored_tokens - sequence.num_computed_tokens)
    return num_tokens


def check_complete(plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
    """Raise ModelExecutionError when the result lacks a part that the plan asked for."""
    for scheduled in plan.scheduled:
        request_id = scheduled.request_id
        if request_id in result.failed:
            continue
        if scheduled.samples and request_id not in result.sampled:
            raise ModelExecutionError(f"the model runner returned no token for {request_id}")
        if scheduled.samples and scheduled.sampling.logprobs is not None and request_id not in result.logprobs:
            raise ModelExecutionError(f"the model runner returned no log-probability for {request_id}")
        num_scored = len(result.prompt_logprobs.get(request_id, ()))
        if num_scored != len(scheduled.prompt_targets):
            raise ModelExecutionError(
                f"the model runner returned log-probabilities of {num_scored} prompt tokens of {request_id}; "
                f"{len(scheduled.prompt_targets)} were asked for"
            )
