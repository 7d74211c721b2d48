"""From the engine's token outputs to deltas of text, for streamed and plain answers alike.

One call has one or more choices. Stop strings are found here (the engine knows tokens only), and the timings that only
this side can see are observed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.errors import DeadlineExceededError
from kvpilot_engine.observability.metrics import EngineMetrics
from kvpilot_engine.server.request_builder import PreparedCall
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.text.output_text import OutputText
from kvpilot_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice: text that may be sent (perhaps none), and why it ended if it did."""

    choice: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class _Choice:
    """The state of one choice while it grows."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], stop_ids: frozenset[int]) -> None:
        self.text = OutputText(tokenizer, stop_strings)
        self.stop_ids = stop_ids
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.first_at: float | None = None
        self.last_at = 0.0


class Generation:
    """One call while it runs. `deltas` may be iterated once; `usage` is right when it has ended."""

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
        self._index = {request.request_id: i for i, request in enumerate(call.requests)}
        self._choices = [
            _Choice(tokenizer, call.stop_strings, frozenset(request.sampling.stop_token_ids))
            for request in call.requests
        ]
        self._stream: GenerationStream = engine.generate(call.requests)
        self._timer = asyncio.get_running_loop().call_later(
            deadline_s,
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
        return Usage(
            num_prompt_tokens=self._call.num_prompt_tokens,
            num_output_tokens=sum(choice.num_output_tokens for choice in self._choices),
            num_cached_tokens=sum(
                choice.num_cached_tokens for choice in self._choices[:: max(1, self._call.num_choices)]
            ),
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every choice yields exactly one delta with a finish_reason, its last. Raises EngineError."""
        async for output in self._stream:
            delta = self._advance(output)
            if delta.text or delta.finish_reason:
                yield delta

    def _advance(self, output: SequenceOutput) -> Delta:
        index = self._index[output.request_id]
        choice = self._choices[index]
        self._observe_tokens(choice, output)
        ids = output.new_token_ids
        if output.finish_reason is FinishReason.STOP and ids and ids[-1] in choice.stop_ids:
            ids = ids[:-1]  # the token that ended it is no text
        result = choice.text.push(ids)
        if result.matched is not None:
            if output.finish_reason is None:
                self._stream.finish(output.request_id)
            self._observe_end(choice, index)
            return Delta(index, result.text, FinishReason.STOP.value)
        if output.finish_reason is None:
            return Delta(index, result.text)
        rest = choice.text.finish()
        self._observe_end(choice, index)
        reason = FinishReason.STOP if rest.matched is not None else output.finish_reason
        return Delta(index, result.text + rest.text, reason.value)

    def _observe_tokens(self, choice: _Choice, output: SequenceOutput) -> None:
        now = self._now()
        choice.num_output_tokens += len(output.new_token_ids)
        choice.num_cached_tokens = max(choice.num_cached_tokens, output.num_cached_tokens)
        if not output.new_token_ids:
            return
        if choice.first_at is None:
            choice.first_at = now
            self._metrics.time_to_first_token_s.observe(now - self._arrived_at)
        else:
            self._metrics.inter_token_s.observe(now - choice.last_at)
        choice.last_at = now

    def _observe_end(self, choice: _Choice, index: int) -> None:
        now = self._now()
        self._metrics.e2e_s.observe(now - self._arrived_at)
        self._metrics.prompt_tokens.observe(len(self._call.requests[index].prompt_token_ids))
        self._metrics.output_tokens.observe(choice.num_output_tokens)
        if choice.first_at is not None:
            self._metrics.decode_s.observe(choice.last_at - choice.first_at)
            if choice.num_output_tokens > 1:
                self._metrics.time_per_output_token_s.observe(
                    (choice.last_at - choice.first_at) / (choice.num_output_tokens - 1)
                )
