"""The engine without device, text, HTTP or clock: requests in, one step at a time, news out. One thread owns it.

    step: schedule → run → update. A step that fails is dropped and leaves no reservation behind.

Invariant: every request that add_request() took ends in exactly one SequenceOutput with a finish_reason, which comes
from step() or from abort().
"""

from __future__ import annotations

from kvpilot_engine.core.capacity import ResizeResult, ResizeState
from kvpilot_engine.core.grammar import ConstraintCompiler, TokenConstraint
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.kv_cache_manager import KVCacheManager
from kvpilot_engine.core.ports import ModelRunner
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler import Scheduler
from kvpilot_engine.core.scheduler_output import FinishReason, Preemption, SchedulerOutput, SequenceOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.core.stats import EngineStats
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    InvalidRequestError,
    ModelExecutionError,
    NeverFitsError,
    OverloadedError,
)

RETRY_AFTER_S = 1
"""What a client that met a full queue is told to wait: about the time in which places in it get free."""


class EngineCore:
    """Composes scheduler, KV cache and model runner."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_blocks: int,
        cache: CacheSettings,
        scheduler: SchedulerSettings,
        model: str,
        constraints: ConstraintCompiler | None = None,
    ) -> None:
        """`num_blocks`: what the storage holds without the null block, so block ids are 0..num_blocks.

        `model` names all that cached values depend on besides tokens: it keeps prefixes of different models apart.
        Without `constraints` a request with a grammar is refused.
        """
        self._runner = runner
        self._constraints = constraints
        self._settings = scheduler
        self._kv_cache = KVCacheManager(
            cache, num_blocks=num_blocks, max_step_tokens=scheduler.max_num_batched_tokens, model=model
        )
        self._scheduler = Scheduler(scheduler, self._kv_cache)
        self._undelivered: list[SequenceOutput] = []
        """Rejections of a plan whose execution then failed; the next step delivers them."""
        self.preempted: tuple[Preemption, ...] = ()
        """Who gave up its blocks in the newest step, also when its execution failed."""

    @property
    def has_work(self) -> bool:
        """True while step() has something to do."""
        return len(self._scheduler) > 0 or bool(self._undelivered)

    @property
    def num_blocks_to_go(self) -> int:
        """Blocks that a deferred resize still waits for; 0 when the cap is in force."""
        return self._kv_cache.pool.num_to_hold_out

    def add_request(self, request: GenerationRequest) -> None:
        """Take a request.

        Raises NeverFitsError when prompt and max_tokens together exceed max_model_len or the whole KV cache: the
        choice is to refuse at the door (400), not to cut the answer at capacity, so that a client who asks for n
        tokens gets n or hears why not. Raises OverloadedError when the queue is full, InvalidRequestError for an id
        that is in use and for a grammar that can't be followed.
        """
        self._check_fits(request)
        if request.request_id in self._scheduler:
            raise InvalidRequestError(f"request id {request.request_id} is in use", param="request_id")
        if self._scheduler.num_waiting >= self._settings.max_queue_len:
            raise OverloadedError(
                f"{self._scheduler.num_waiting} requests are waiting; max_queue_len is {self._settings.max_queue_len}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._scheduler.add(request, self._compile(request))

    def abort(
        self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT, message: str = ""
    ) -> SequenceOutput | None:
        """End a request now and give its blocks back. Its last output; None when it has already ended."""
        return self._scheduler.finish(request_id, reason, message)

    def step(self) -> list[SequenceOutput]:
        """Compute one batch; news of all sequences that got a token or ended.

        A ModelExecutionError ends every scheduled sequence as ERROR; the others go on. A DeviceOutOfMemoryError is
        raised after the plan was dropped: no request is lost, and the caller decides whether to step again.
        """
        plan = self._scheduler.schedule()
        self.preempted = plan.preempted
        self._undelivered.extend(plan.rejected)
        if plan.scheduled:
            self._undelivered.extend(self._run(plan))
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def resize(self, usable_blocks: int) -> ResizeResult:
        """Change how many blocks may be used. Growing is immediate; shrinking takes blocks as they get free.

        The floor is one request of max_model_len; that covers every live request, since none longer is taken.
        """
        pool = self._kv_cache.pool
        if usable_blocks > pool.num_blocks:
            return ResizeResult(
                ResizeState.REJECTED, reason=f"{usable_blocks} blocks asked for, the storage holds {pool.num_blocks}"
            )
        floor = self._kv_cache.num_blocks_to_hold(self._settings.max_model_len)
        if usable_blocks < min(floor, pool.target_blocks):
            return ResizeResult(
                ResizeState.REJECTED,
                reason=f"{usable_blocks} blocks asked for, one request of max_model_len "
                f"{self._settings.max_model_len} needs {floor}",
            )
        pool.set_target(usable_blocks)
        if pool.num_to_hold_out:
            return ResizeResult(ResizeState.DEFERRED, pool.num_to_hold_out)
        return ResizeResult(ResizeState.APPLIED)

    def stats(self) -> EngineStats:
        """A snapshot of this moment; nothing in it is left over from the last step."""
        pool = self._kv_cache.pool
        counters = self._scheduler.counters
        num_waiting = self._scheduler.num_waiting
        # Admission never bypasses, so all that wait do so for the first one's reason.
        lacks_capacity = self._scheduler.lacks_capacity()
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting_capacity=num_waiting if lacks_capacity else 0,
            num_waiting_budget=0 if lacks_capacity else num_waiting,
            num_swapped_out=self._scheduler.num_swapped_out,
            num_blocks_total=pool.num_blocks - pool.num_held_out,
            num_blocks_held_out=pool.num_held_out,
            num_blocks_free=pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_blocks_used=pool.num_used,
            block_size=self._kv_cache.block_size,
            num_steps_total=counters.num_steps,
            num_preemptions_total=counters.num_preemptions,
            num_recomputed_tokens_total=counters.num_recomputed_tokens,
            num_prompt_tokens_total=counters.num_prompt_tokens,
            num_generation_tokens_total=counters.num_generation_tokens,
            num_prefix_queries_total=counters.num_prefix_queries,
            num_prefix_hits_total=counters.num_prefix_hits,
            finished_total=dict(counters.finished),
            block_size_advice=self._scheduler.block_size_advisor.advise(),
        )

    def check_invariants(self) -> None:
        """Assert that all bookkeeping agrees. For tests, after every step."""
        self._scheduler.check_invariants()

    def _run(self, plan: SchedulerOutput) -> list[SequenceOutput]:
        try:
            result = self._runner.execute(plan)
            return self._scheduler.update_from_output(plan, result)
        except DeviceOutOfMemoryError:
            self._scheduler.drop(plan)
            raise
        except ModelExecutionError as error:
            message = str(error)
        self._scheduler.drop(plan)
        ended = (self._scheduler.finish(s.request_id, FinishReason.ERROR, message) for s in plan.scheduled)
        return [output for output in ended if output is not None]

    def _compile(self, request: GenerationRequest) -> TokenConstraint | None:
        if request.grammar is None:
            return None
        if self._constraints is None:
            raise InvalidRequestError("this model is served without structured output", param="response_format")
        return self._constraints.compile(request.grammar)

    def _check_fits(self, request: GenerationRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        num_cache_blocks = self._kv_cache.pool.target_blocks
        limits = [(self._settings.max_model_len, "max_model_len is")]
        # Behind a sliding window blocks are given away: longer requests than the cache holds at once may fit.
        if self._kv_cache.num_blocks_to_hold(num_prompt_tokens + max_tokens) > num_cache_blocks:
            limits.append((num_cache_blocks * self._kv_cache.block_size, "the whole KV cache holds"))
        for limit, what in limits:
            if num_prompt_tokens + min(1, max_tokens) > limit:
                output = " and at least 1 is to be generated" if max_tokens else ""
                raise NeverFitsError(
                    f"the prompt has {num_prompt_tokens} tokens{output}; {what} {limit}",
                    param="prompt",
                )
            if num_prompt_tokens + max_tokens > limit:
                raise NeverFitsError(
                    f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make "
                    f"{num_prompt_tokens + max_tokens} tokens; {what} {limit}",
                    param="max_tokens",
                )
