"""Doubles for the two-process path: a model that is loaded at once, says the alphabet, and misbehaves on command.

Token ids are byte values, END ends. The token after `A` is `B`, after `Z` comes END, after anything else `A`: what a
request answers can be read off its prompt, and a wrong token shows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvpilot_engine.core.grammar import ConstraintCompiler, TokenMask
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.core.ports import ModelRunner
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    DoesNotFitError,
    ModelExecutionError,
    ModelNotFoundError,
    OOMCause,
    OOMPhase,
)

END = TokenId(256)
VOCAB_SIZE = 257
BYTES_PER_BLOCK = 1000
BLOCKS_OF_DEVICE = 100
"""A share of 0.5 holds 50 blocks."""


class AlphabetRunner:
    """`script` is a file read before each step: empty, hang, oom, fault, bug, crash, or nan (one sequence's, once)."""

    def __init__(self, script: Path | None, step_s: float, said: str = "") -> None:
        """`said` is what every sequence answers instead of the alphabet."""
        self._script = script
        self._step_s = step_s
        self._said = said.encode()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled = {s.request_id: self._choose(s) for s in plan.scheduled if s.samples}
        failed = {}
        if self._obey() == "nan" and sampled:
            request_id = next(iter(sampled))
            del sampled[request_id]
            failed[request_id] = "its logits are not finite"
            if self._script is not None:
                self._script.write_text("")  # once
        return ModelRunnerOutput(
            sampled,
            failed=failed,
            logprobs={
                s.request_id: make_logprobs(sampled[s.request_id], s.sampling.logprobs)
                for s in plan.scheduled
                if s.request_id in sampled and s.sampling.logprobs is not None
            },
            prompt_logprobs={
                s.request_id: tuple(make_logprobs(token, s.sampling.prompt_logprobs or 0) for token in s.prompt_targets)
                for s in plan.scheduled
                if s.prompt_targets
            },
        )

    def _choose(self, sequence: ScheduledSequence) -> TokenId:
        if not self._said:
            return _follow_mask(_next_token(sequence.token_ids[-1]), sequence.token_mask)
        position = sequence.num_output_tokens
        token = TokenId(self._said[position]) if position < len(self._said) else END
        return _follow_mask(token, sequence.token_mask)

    def _obey(self) -> str:
        time.sleep(self._step_s)
        command = self._script.read_text() if self._script is not None and self._script.exists() else ""
        if command == "hang":
            while self._script is not None and self._script.read_text() == "hang":
                time.sleep(0.01)
        elif command == "oom":
            raise DeviceOutOfMemoryError(
                "1 MiB asked for", phase=OOMPhase.DECODE, cause=OOMCause.OWN, requested_bytes=5, limit_bytes=100
            )
        elif command == "fault":
            raise ModelExecutionError("a step failed")
        elif command == "bug":
            raise RuntimeError("an invariant broke")
        elif command == "crash":
            os._exit(3)
        return command


def _next_token(token: TokenId) -> TokenId:
    if ord("A") <= token < ord("Z"):
        return TokenId(token + 1)
    return END if token == ord("Z") else TokenId(ord("A"))


def _follow_mask(token: TokenId, mask: TokenMask | None) -> TokenId:
    """As a sampler does: in place of a token that the grammar forbids comes END if it may end, else the lowest id."""
    if mask is None:
        return token
    words = cast(Any, mask)
    candidates = (token, END, *map(TokenId, range(VOCAB_SIZE)))
    return next(t for t in candidates if int(words[t // 32]) >> (t % 32) & 1)


def make_logprobs(token: TokenId, num_top: int) -> TokenLogprobs:
    """The token itself at -0.5 and first, then its followers at -1, -2, … and nothing else: minus infinity."""
    top = [
        (token, -0.5),
        *((TokenId((token + i) % VOCAB_SIZE), -float(i) if i < 3 else -math.inf) for i in range(1, 9)),
    ]
    return TokenLogprobs(token, -0.5, 1, tuple(top[:num_top]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeServingModel:
    runner: ModelRunner
    cache: CacheSettings
    scheduler: SchedulerSettings
    num_blocks: int
    vocab_size: int = VOCAB_SIZE
    cache_key: str = "alphabet float32"
    constraints: ConstraintCompiler | None = None

    def usable_blocks_at(self, utilization: float) -> int:
        return min(self.num_blocks, int(utilization * BLOCKS_OF_DEVICE))

    def memory_report(self, *, utilization: float, num_usable_blocks: int, num_used_blocks: int) -> MemoryReport:
        total = BLOCKS_OF_DEVICE * BYTES_PER_BLOCK
        per_request = -(-self.scheduler.max_model_len // self.cache.block_size)
        return MemoryReport(
            device="cpu",
            device_total_bytes=total,
            device_free_bytes=total // 2,
            utilization=utilization,
            limit_bytes=int(utilization * total),
            process_base_bytes=0,
            weights_bytes=0,
            activations_peak_bytes=0,
            kv_reserved_bytes=num_usable_blocks * BYTES_PER_BLOCK,
            kv_used_bytes=num_used_blocks * BYTES_PER_BLOCK,
            kv_bytes_per_block=BYTES_PER_BLOCK,
            kv_tokens=num_usable_blocks * self.cache.block_size,
            max_model_len=self.scheduler.max_model_len,
            min_utilization=per_request / BLOCKS_OF_DEVICE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModelLoader:
    """Picklable. `load_error`: oom | does_not_fit | not_found | bug; `oom_above`: loads only at smaller shares."""

    max_model_len: int = 128
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    block_size: int = 4
    step_s: float = 0.0
    script: Path | None = None
    load_error: str = ""
    oom_above: float = 1.0
    said: str = ""
    make_constraints: Callable[[], ConstraintCompiler] | None = None
    """A function of a module, so that it can be pickled; None: grammars are refused."""
    load_gate: Path | None = None
    """Loading waits until this file exists."""
    device_name: str = "cpu"

    def load(self, utilization: float) -> FakeServingModel:
        while self.load_gate is not None and not self.load_gate.exists():
            time.sleep(0.01)
        if self.load_error == "oom" or utilization > self.oom_above:
            raise DeviceOutOfMemoryError(
                "weights", phase=OOMPhase.LOAD, cause=OOMCause.OWN, requested_bytes=3, limit_bytes=90
            )
        if self.load_error == "does_not_fit":
            raise DoesNotFitError(
                "too small", required_bytes=10, available_bytes=5, suggested={"utilization": 0.95, "max_model_len": 64}
            )
        if self.load_error == "not_found":
            raise ModelNotFoundError("no such model")
        if self.load_error == "bug":
            raise RuntimeError("a bug in loading")
        return FakeServingModel(
            runner=AlphabetRunner(self.script, self.step_s, self.said),
            constraints=None if self.make_constraints is None else self.make_constraints(),
            cache=CacheSettings(block_size=self.block_size),
            scheduler=SchedulerSettings(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
            ),
            num_blocks=BLOCKS_OF_DEVICE,
        )
