"""From the engine's token outputs to deltas of text, for streamed and plain answers alike.

One call has one or more candidates. The timings that only this side can see are observed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from kvpilot_engine.core.scheduler_output import SequenceOutput
from kvpilot_engine.errors import DeadlineExceededError
from kvpilot_engine.observability.metrics import EngineMetrics
from kvpilot_engine.server.candidate import Candidate
from kvpilot_engine.server.deltas import Delta, Usage
from kvpilot_engine.server.prepared_call import PreparedCall
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.text.tokenizer import Tokenizer


class Generation:
    """One call while it runs. `batches` may be iterated once; `usage` is right when it has ended."""

    def __init__(
        self,
        call: PreparedCall,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        *,
        arrived_at: float,
        deadline_s: float,
        now: Callable[[], float],
    ) -> None:
        """Hands the call to the engine: raises what AsyncEngine.generate raises."""
        self._call = call
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._now = now
        self.candidates = [Candidate(i, call, tokenizer) for i in range(len(call.requests))]
        self._by_id = {candidate.request.request_id: candidate for candidate in self.candidates}
        self._stream: GenerationStream = engine.generate(call.requests)
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, arrived_at + deadline_s - now()),
            self._stream.put,
            DeadlineExceededError(f"the request did not end within its deadline of {deadline_s:g} s"),
        )
        metrics.num_choices.observe(call.num_choices)
        for request in call.requests:
            metrics.max_tokens.observe(request.sampling.max_tokens)

    def close(self) -> None:
        """Abort what has not ended. Every way out of a handler calls it."""
        self._timer.cancel()
        self._stream.close()

    @property
    def usage(self) -> Usage:
        first_of_prompts = self.candidates[:: self._call.num_candidates]
        return Usage(
            num_prompt_tokens=self._call.num_prompt_tokens,
            num_output_tokens=sum(candidate.num_output_tokens for candidate in self.candidates),
            num_cached_tokens=sum(candidate.num_cached_tokens for candidate in first_of_prompts),
        )

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token of any candidate."""
        times = [candidate.first_at for candidate in self.candidates if candidate.first_at is not None]
        return min(times) - self._arrived_at if times else None

    async def batches(self) -> AsyncGenerator[Sequence[Delta], None]:
        """All news that is there at a time, never empty. Each candidate has exactly one delta with a finish_reason, its
        last. Raises EngineError."""
        while outputs := await self._stream.next_batch():
            deltas = [delta for output in outputs if (delta := self._advance(output)) is not None and delta.is_news]
            if deltas:
                yield deltas

    def _advance(self, output: SequenceOutput) -> Delta | None:
        candidate = self._by_id[output.request_id]
        if candidate.has_ended:
            return None  # came in one batch with what held its stop string
        self._observe_tokens(candidate, output)
        delta = candidate.advance(output)
        if delta.finish_reason is not None:
            if output.finish_reason is None:
                self._stream.finish(output.request_id)
            self._observe_end(candidate)
        return delta

    def _observe_tokens(self, candidate: Candidate, output: SequenceOutput) -> None:
        if not output.new_token_ids:
            return
        now = self._now()
        if candidate.first_at is None:
            candidate.first_at = now
            self._metrics.time_to_first_token_s.observe(now - self._arrived_at)
        else:
            self._metrics.inter_token_s.observe(now - candidate.last_at)
        candidate.last_at = now

    def _observe_end(self, candidate: Candidate) -> None:
        now = self._now()
        self._metrics.e2e_s.observe(now - self._arrived_at)
        self._metrics.prompt_tokens.observe(len(candidate.request.prompt_token_ids))
        self._metrics.output_tokens.observe(candidate.num_output_tokens)
        if candidate.first_at is not None:
            decode_s = candidate.last_at - candidate.first_at
            self._metrics.decode_s.observe(decode_s)
            if candidate.num_output_tokens > 1:
                self._metrics.time_per_output_token_s.observe(decode_s / (candidate.num_output_tokens - 1))
