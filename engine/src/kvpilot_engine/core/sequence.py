"""The mutable state of one request, and the only place where it may change its status.

Changed by the scheduler and the KV cache manager only; everything that leaves the core is a frozen copy.
Invariant: num_computed_tokens < num_tokens while it lives, and a waiting sequence holds no blocks.

    WAITING ──start──▶ RUNNING ──finish──▶ FINISHED
       ▲  └──────────────│──────finish────────▲
       └──return_to_queue┘  (preempted, or its first plan was dropped)
"""

from __future__ import annotations

from enum import Enum, auto

from kvpilot_engine.core.block_table import BlockTable
from kvpilot_engine.core.grammar import TokenConstraint
from kvpilot_engine.core.ids import BlockHash, RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.core.token_logprobs import TokenLogprobs


class SequenceStatus(Enum):
    """Where a sequence stands; why it ended is FinishReason's question."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request's tokens, progress and blocks."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "constraint",
        "finish_reason",
        "is_counted",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_ever_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unscored_tokens",
        "request",
        "status",
        "token_ids",
    )

    def __init__(
        self, request: GenerationRequest, *, arrival: int, block_size: int, constraint: TokenConstraint | None = None
    ) -> None:
        """`arrival` orders sequences for good: lower came earlier."""
        self.request = request
        self.constraint = constraint
        """Where it stands in its grammar; moved by commits."""
        self.arrival = arrival
        self.token_ids: list[TokenId] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.block_table = BlockTable(block_size)
        self.block_hashes: list[BlockHash] = []
        """Names of the leading full blocks, filled as they are asked for; tokens never change, so neither do they."""
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the blocks; moved by commits."""
        self.num_ever_computed_tokens = 0
        """The most that num_computed_tokens ever was: what lies below it is computed again, not anew."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.num_unscored_tokens = 0 if request.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1
        """Prompt tokens, the last ones, whose log-probabilities are wanted and not reported yet."""
        self.num_preemptions = 0
        self.is_counted = False
        """True once its admission is in the statistics: with the first committed step."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def place(self) -> tuple[int, int]:
        """Sorts sequences: lower is served first and preempted last."""
        return self.request.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        """Length of the sequence if nothing but max_tokens ends it."""
        return self.num_prompt_tokens + self.request.sampling.max_tokens

    @property
    def num_scored_tokens(self) -> int:
        """Leading tokens whose logits nobody needs any more: their keys and values may come from the prefix cache."""
        if self.num_unscored_tokens:
            return self.num_prompt_tokens - 1 - self.num_unscored_tokens
        return self.num_tokens - 1

    @property
    def generates(self) -> bool:
        """False for a request that only scores its prompt."""
        return self.request.sampling.max_tokens > 0

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def start(self, *, num_cached_tokens: int) -> None:
        """Begin to run; the first num_cached_tokens are already in the blocks of its table."""
        assert self.status is SequenceStatus.WAITING, f"{self.request_id} starts while {self.status.name}"
        self.status = SequenceStatus.RUNNING
        self.num_computed_tokens = num_cached_tokens
        if not self.is_counted:
            self.num_cached_tokens = num_cached_tokens

    def return_to_queue(self) -> None:
        """Lose all progress in the cache; the tokens stay. Its blocks must have been given back before."""
        assert self.status is SequenceStatus.RUNNING, f"{self.request_id} is put back while {self.status.name}"
        assert len(self.block_table) == 0, f"{self.request_id} is put back with blocks"
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0

    def advance(self, num_tokens: int) -> None:
        """Count tokens as computed."""
        assert self.status is SequenceStatus.RUNNING
        self.num_computed_tokens += num_tokens
        assert self.num_computed_tokens <= self.num_tokens, f"{self.request_id} computed more tokens than it has"
        self.num_ever_computed_tokens = max(self.num_ever_computed_tokens, self.num_computed_tokens)

    def append_token(self, token_id: TokenId) -> None:
        assert self.num_computed_tokens == self.num_tokens, f"{self.request_id} sampled from an incomplete prefix"
        self.token_ids.append(token_id)

    def finish(self, reason: FinishReason) -> None:
        """End for good, from any live status. Its blocks must have been given back before."""
        assert not self.is_finished, f"{self.request_id} ends twice"
        assert len(self.block_table) == 0, f"{self.request_id} ends with blocks"
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason

    def build_output(
        self,
        new_token_ids: tuple[TokenId, ...] = (),
        message: str = "",
        *,
        is_refusal: bool = False,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SequenceOutput:
        """News of the sequence as it stands now."""
        return SequenceOutput(
            self.request_id,
            new_token_ids,
            self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            message=message,
            is_refusal=is_refusal,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
