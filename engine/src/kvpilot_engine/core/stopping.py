"""When is a sequence finished, and why. Stop strings are text and so not known here; the parent ends those."""

from __future__ import annotations

from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.core.sequence import Sequence


def check_stop(sequence: Sequence) -> FinishReason | None:
    """Reason to end after the token that was just appended, or None to go on.

    A stop token wins over the length: who asked for n tokens and got the end token as the n-th has a whole answer.
    Among the first min_tokens it is a token like any other.
    """
    sampling = sequence.request.sampling
    may_stop = not sampling.ignore_eos and sequence.num_output_tokens > sampling.min_tokens
    if may_stop and sequence.token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if sequence.num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
