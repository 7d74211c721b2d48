"""Concurrent streamed requests against one server, and the result as one JSON object.

Not the command line (`stress`), not starting servers (`engine`). Invariant: every request of the plan is in the result,
as a success or under the kind of its error; figures of time are made of successes only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvpilot_tools.bench.memory_probe import Probe, watch_memory
from kvpilot_tools.bench.prompts import CountTokens, Prompt, build_prompt, message
from kvpilot_tools.bench.sample_statistics import Summary, summarize
from kvpilot_tools.bench.streaming_client import RequestRecord, Target, stream_request

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send. Request i has prompt_tokens[i % len] and output_tokens[i % len] tokens."""

    num_requests: int
    concurrency: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    ignores_eos: bool = True
    """Answers are as long as asked for; a field that vLLM, llama.cpp and kvpilot have and OpenAI has not."""
    temperature: float = 0.0
    seed: int = 0

    def prompt_tokens_of(self, index: int) -> int:
        return self.prompt_tokens[index % len(self.prompt_tokens)]

    def output_tokens_of(self, index: int) -> int:
        return self.output_tokens[index % len(self.output_tokens)]


@dataclass(slots=True)
class LiveCounts:
    """Where a run stands; read by whoever shows progress."""

    num_requests: int
    sent: int = 0
    first_tokens: int = 0
    events: int = 0
    ended: int = 0
    failed: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def describe(self) -> str:
        rate = self.events / self.elapsed_s if self.elapsed_s > 0 else 0.0
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.elapsed_s:5.1f} s  {self.ended}/{self.num_requests} ended{failed}, "
            f"{self.sent - self.ended} in flight, {self.first_tokens} first tokens, {rate:.0f} tokens/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What was sent and what came of it."""

    plan: LoadPlan
    records: tuple[RequestRecord, ...]
    duration_s: float
    memory_peak_bytes: Mapping[str, int]

    @property
    def successes(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def errors(self) -> Counter[str]:
        return Counter(record.error for record in self.records if record.error is not None)

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens or 0 for record in self.successes)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def ttft(self) -> Summary | None:
        return summarize(record.ttft_s for record in self.successes if record.ttft_s is not None)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate from the moment when every answer had begun to the end; None when nothing came after it."""
        good = [record for record in self.successes if record.text_s]
        if not good:
            return None
        all_begun_s = max(record.text_s[0] for record in good)
        end_s = max(record.text_s[-1] for record in good)
        # An event may carry more or less than a token, so events are weighted to the tokens that the server counted.
        tokens = sum(
            sum(at > all_begun_s for at in record.text_s) * (record.output_tokens or 0) / len(record.text_s)
            for record in good
        )
        return tokens / (end_s - all_begun_s) if end_s > all_begun_s else None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "load": {
                "requests": self.plan.num_requests,
                "concurrency": self.plan.concurrency,
                "prompt_tokens": list(self.plan.prompt_tokens),
                "output_tokens": list(self.plan.output_tokens),
                "ignore_eos": self.plan.ignores_eos,
                "temperature": self.plan.temperature,
                "seed": self.plan.seed,
            },
            "requests": {
                "started": len(self.records),
                "succeeded": len(self.successes),
                "failed": sum(self.errors.values()),
                "errors": dict(sorted(self.errors.items())),
                "first_error": next((r.detail for r in self.records if r.error is not None), None),
            },
            "duration_s": round(self.duration_s, 4),
            "ttft_s": _json(self.ttft),
            "ttft_s_by_prompt_tokens": {
                str(size): _json(
                    summarize(
                        r.ttft_s for r in self.successes if r.wanted_prompt_tokens == size and r.ttft_s is not None
                    )
                )
                for size in sorted(set(self.plan.prompt_tokens))
            },
            "inter_token_s": _json(summarize(gap for r in self.successes for gap in r.gaps_s)),
            "time_per_output_token_s": _json(
                summarize(r.time_per_output_token_s for r in self.successes if r.time_per_output_token_s is not None)
            ),
            "request_s": _json(summarize(r.ended_s - r.sent_s for r in self.successes)),
            "throughput": {
                "output_tokens_per_s": round(self.output_tokens_per_s, 3),
                "prompt_tokens_per_s": round(
                    sum(r.prompt_tokens or 0 for r in self.successes) / self.duration_s if self.duration_s > 0 else 0.0,
                    3,
                ),
                "requests_per_s": round(len(self.successes) / self.duration_s if self.duration_s > 0 else 0.0, 4),
            },
            "memory_peak_bytes": dict(self.memory_peak_bytes),
            "records": [_record_json(record) for record in self.records],
        }


def _json(summary: Summary | None) -> dict[str, float] | None:
    return None if summary is None else summary.as_json()


def _record_json(record: RequestRecord) -> dict[str, Any]:
    return {
        "index": record.index,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "sent_s": round(record.sent_s, 4),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "ended_s": round(record.ended_s, 4),
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


async def build_prompts(plan: LoadPlan, count_tokens: CountTokens) -> list[Prompt]:
    """One prompt a request; the same plan has the same prompts."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible on purpose
    return [await build_prompt(rng, plan.prompt_tokens_of(i), count_tokens) for i in range(plan.num_requests)]


async def run_load(
    session: aiohttp.ClientSession,
    target: Target,
    plan: LoadPlan,
    prompts: Sequence[Prompt],
    *,
    probes: Sequence[Probe] = (),
    on_counts: Callable[[LiveCounts], None] | None = None,
) -> LoadResult:
    """Send every request of the plan, at most `concurrency` at once, in order."""
    places = asyncio.Semaphore(plan.concurrency)
    counts = LiveCounts(plan.num_requests)

    def tell() -> None:
        if on_counts is not None:
            on_counts(counts)

    def take_text(record: RequestRecord) -> None:
        counts.events += 1
        counts.first_tokens += len(record.text_s) == 1
        tell()

    async def one(index: int) -> RequestRecord:
        async with places:
            record = RequestRecord(
                index=index,
                wanted_prompt_tokens=plan.prompt_tokens_of(index),
                wanted_output_tokens=plan.output_tokens_of(index),
                sent_s=0.0,
            )
            counts.sent += 1
            tell()
            body = build_body(target, plan, prompts[index].text, record.wanted_output_tokens)
            await stream_request(session, target, body, record, run_began=began, on_text=take_text)
            if record.prompt_tokens is None:
                record.prompt_tokens = prompts[index].num_tokens
            counts.ended += 1
            counts.failed += record.error is not None
            tell()
            return record

    async with watch_memory(list(probes)) as memory:
        began = counts.began = time.perf_counter()
        records = await asyncio.gather(*(one(index) for index in range(plan.num_requests)))
        duration_s = time.perf_counter() - began
    return LoadResult(plan=plan, records=tuple(records), duration_s=duration_s, memory_peak_bytes=memory.peaks)


def build_body(target: Target, plan: LoadPlan, text: str, output_tokens: int) -> dict[str, object]:
    """The fields of a request beside model and streaming."""
    asked: dict[str, object] = {"messages": message(text)} if target.endpoint == "chat" else {"prompt": text}
    body = {**asked, "max_tokens": output_tokens, "temperature": plan.temperature}
    if plan.ignores_eos:
        body["ignore_eos"] = True
    return body
