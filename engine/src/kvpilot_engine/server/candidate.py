"""One output while it grows: from the engine's tokens to text, with the tokens' log-probabilities beside it.

Stop strings and tool calls are found here (the engine knows tokens only). The token that ended an output is no part of
its text, nor of its log-probabilities, unless the call asks for stops to be kept.
"""

from __future__ import annotations

from collections import deque

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.server.deltas import Delta, ToldToken
from kvpilot_engine.server.prepared_call import PreparedCall
from kvpilot_engine.text.output_text import OutputPiece, OutputText
from kvpilot_engine.text.tokenizer import Tokenizer
from kvpilot_engine.text.tool_parser import ToolCallDelta


class Candidate:
    """`advance` for each output of the engine, until it returns a delta with a finish_reason."""

    def __init__(self, index: int, call: PreparedCall, tokenizer: Tokenizer) -> None:
        self.index = index
        self.request: GenerationRequest = call.requests[index]
        self._stop_ids = self.request.sampling.stop_token_ids
        self._own_stop_ids = call.own_stop_ids
        self._keeps_stop = call.keeps_stop
        self._tells_tokens = call.num_top is not None
        self._text = OutputText(
            tokenizer,
            call.stop_strings,
            skip_specials=call.skip_specials,
            keeps_stop=call.keeps_stop,
            num_unstoppable=self.request.sampling.min_tokens if call.stop_strings else 0,
            tracks_tokens=self._tells_tokens,
        )
        self._parser = call.plan.new_parser()
        self._echo = call.echo_of(index)
        self._text_start = 0 if self._echo is None else len(self._echo.text)
        self._held: deque[TokenLogprobs] = deque()
        self._untold: tuple[ToldToken, ...] = ()
        """Tokens without text of their own (control tokens): they are told with what follows."""
        self._tells_ids = call.tells_ids
        self._untold_ids: tuple[TokenId, ...] = ()
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of all prompt tokens but the first; complete with the first output token."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.logprob_sum = 0.0
        """Of all output tokens, where the engine reports them."""
        self.has_ended = False
        self.first_at: float | None = None
        self.last_at = 0.0

    @property
    def mean_logprob(self) -> float:
        return self.logprob_sum / max(1, self.num_output_tokens)

    def advance(self, output: SequenceOutput) -> Delta:
        self.num_output_tokens += len(output.new_token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.prompt_logprobs += output.prompt_logprobs
        self.logprob_sum += sum(entry.logprob for entry in output.logprobs)
        ids, logprobs, stop_id = self._without_stop(output)
        if self._tells_tokens:
            self._held.extend(logprobs)
        piece = self._text.push(ids)
        text, reason = piece.text, output.finish_reason
        tokens = self._take_tokens(piece)
        if piece.matched is None and reason is not None:
            piece = self._text.finish()
            text += piece.text
            tokens += self._take_tokens(piece)
        if piece.matched is not None:
            reason = FinishReason.STOP
        self.has_ended = reason is not None
        if self._echo is not None and (output.new_token_ids or reason is not None):
            text, tokens = self._echo.text + text, self._take_echo() + tokens
        text, calls, finish_reason = self._read_calls(text, reason)
        tokens, self._untold = self._untold + tokens, ()
        output_ids, self._untold_ids = self._untold_ids + output.new_token_ids if self._tells_ids else (), ()
        if not text and not calls and reason is None:
            tokens, self._untold = (), tokens
            output_ids, self._untold_ids = (), output_ids
        return Delta(
            self.index,
            text,
            finish_reason,
            piece.matched if piece.matched is not None else stop_id,
            tokens,
            calls,
            output_ids,
        )

    def _read_calls(self, text: str, reason: FinishReason | None) -> tuple[str, tuple[ToolCallDelta, ...], str | None]:
        """Part text from tool calls; a whole call makes the end that the answer tells."""
        if self._parser is None:
            return text, (), None if reason is None else reason.value
        parsed = self._parser.push(text)
        if reason is None:
            return parsed.content, parsed.calls, None
        rest = self._parser.finish()
        return parsed.content + rest.content, parsed.calls + rest.calls, self._parser.map_finish_reason(reason.value)

    def _without_stop(
        self, output: SequenceOutput
    ) -> tuple[tuple[TokenId, ...], tuple[TokenLogprobs, ...], TokenId | None]:
        """The tokens that are text, and the one of the client's stop_token_ids that ended the output."""
        ids, logprobs = output.new_token_ids, output.logprobs
        if output.finish_reason is not FinishReason.STOP or not ids or ids[-1] not in self._stop_ids:
            return ids, logprobs, None
        stop_id = ids[-1] if ids[-1] in self._own_stop_ids else None
        return (ids, logprobs, stop_id) if self._keeps_stop else (ids[:-1], logprobs[: len(ids) - 1], stop_id)

    def _take_tokens(self, piece: OutputPiece) -> tuple[ToldToken, ...]:
        if not piece.offsets:
            return ()
        entries = [self._held.popleft() for _ in piece.offsets]
        return tuple(
            ToldToken(entry.token_id, self._text_start + offset, entry)
            for entry, offset in zip(entries, piece.offsets, strict=True)
        )

    def _take_echo(self) -> tuple[ToldToken, ...]:
        echo, self._echo = self._echo, None
        if echo is None or not self._tells_tokens:
            return ()
        return tuple(
            ToldToken(token_id, offset, logprobs)
            for token_id, offset, logprobs in zip(
                self.request.prompt_token_ids, echo.offsets, [None, *self.prompt_logprobs], strict=True
            )
        )
