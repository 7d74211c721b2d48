"""The scheduler alone: `make bench-scheduling`. What a step costs without a model, and what it grows with.

A runner that returns the same token for everybody stands in for the model, so that all the time is the core's: plan,
commit and the statistics after the step. Cases of one question are measured in turns, several rounds, and the best
round counts: on a busy machine the rest is others' work. Nothing here compares with another project.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_tools.repository import BUILD

PROMPT_TOKENS = 64
MAX_TOKENS = 2_000
"""More than all rounds take: nobody ends."""
STEPS = 60
MODEL_STEP_S = 0.040
"""A step of the model at 32 streams, of which scheduling should take less than a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    num_running: int
    num_waiting: int = 0
    num_blocks: int = 65_536
    prompt_tokens: int = PROMPT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: str
    num_running: int
    num_waiting: int
    num_blocks: int
    prompt_tokens: int
    step_us: float
    steps_per_s: float
    us_per_sequence: float


CASES = (
    *(Case(name="batch", num_running=n) for n in (1, 8, 32, 64, 256, 1024)),
    *(Case(name="waiting", num_running=256, num_waiting=n) for n in (0, 100, 1_000, 10_000)),
    *(Case(name="cache", num_running=256, num_blocks=n) for n in (16_384, 65_536, 262_144)),
    *(Case(name="length", num_running=256, prompt_tokens=n, num_blocks=262_144) for n in (64, 1024, 8192)),
)


class ConstantRunner:
    """Costs next to nothing: one dictionary a step."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput({s.request_id: TokenId(7) for s in plan.scheduled if s.samples})


def prepare(case: Case) -> EngineCore:
    """An engine with everybody decoding, and the others waiting for a place in the batch."""
    total = case.num_running + case.num_waiting
    engine = EngineCore(
        ConstantRunner(),
        num_blocks=case.num_blocks,
        cache=CacheSettings(),
        scheduler=SchedulerSettings(
            max_num_seqs=case.num_running,
            max_num_batched_tokens=case.num_running * case.prompt_tokens,
            max_model_len=case.num_blocks * 16,
            max_queue_len=total,
        ),
        model="none",
    )
    for i in range(total):
        prompt = tuple(TokenId(token) for token in range(i * 10_000, i * 10_000 + case.prompt_tokens))
        engine.add_request(
            GenerationRequest(
                request_id=RequestId(f"{i}"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            )
        )
    while engine.stats().num_running < case.num_running:
        engine.step()
    return engine


def measure_step_s(engine: EngineCore) -> float:
    """Seconds of one step with its statistics, mean of STEPS."""
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
        engine.stats()
    return (time.perf_counter() - started) / STEPS


def measure(cases: tuple[Case, ...], *, num_rounds: int) -> list[Result]:
    engines = [prepare(case) for case in cases]
    best = [float("inf")] * len(cases)
    for _ in range(num_rounds):
        for index, engine in enumerate(engines):
            best[index] = min(best[index], measure_step_s(engine))
    return [
        Result(
            case=case.name,
            num_running=case.num_running,
            num_waiting=case.num_waiting,
            num_blocks=case.num_blocks,
            prompt_tokens=case.prompt_tokens,
            step_us=seconds * 1e6,
            steps_per_s=1 / seconds,
            us_per_sequence=seconds * 1e6 / case.num_running,
        )
        for case, seconds in zip(cases, best, strict=True)
    ]


def summarize(results: list[Result]) -> dict[str, float]:
    """The questions of the benchmark as one number each; ratios above 1 are growth."""

    def step_us(name: str) -> list[float]:
        return [result.step_us for result in results if result.case == name]

    batch = {result.num_running: result for result in results if result.case == "batch"}
    return {
        "steps_per_s_256": batch[256].steps_per_s,
        "steps_per_s_1024": batch[1024].steps_per_s,
        "us_per_sequence_ratio_1024_to_64": batch[1024].us_per_sequence / batch[64].us_per_sequence,
        "waiting_ratio": step_us("waiting")[-1] / step_us("waiting")[0],
        "cache_size_ratio": step_us("cache")[-1] / step_us("cache")[0],
        "length_ratio": step_us("length")[-1] / step_us("length")[0],
        "share_of_40_ms_step_at_32": batch[32].step_us * 1e-6 / MODEL_STEP_S,
    }


def publish(results: list[Result], summary: dict[str, float]) -> None:
    table = Table(title="scheduling alone, per step")
    for column in ("case", "running", "waiting", "blocks", "prompt", "µs a step", "steps/s", "µs a sequence"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for r in results:
        counts = (r.num_running, r.num_waiting, r.num_blocks, r.prompt_tokens)
        figures = (f"{r.step_us:,.0f}", f"{r.steps_per_s:,.0f}", f"{r.us_per_sequence:.2f}")
        table.add_row(r.case, *(f"{count:,}" for count in counts), *figures)
    Console(width=100).print(table)
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    report = {"bench": "scheduling", "machine": machine, "rows": [asdict(r) for r in results], **summary}
    folder = BUILD / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scheduling.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, choices=range(1, 31), metavar="1..30")
    results = measure(CASES, num_rounds=parser.parse_args().rounds)
    publish(results, summarize(results))


if __name__ == "__main__":
    main()
