"""kvpilot-bench: many streaming requests at once against any OpenAI server; how soon and how fast answers come.

examples:
  kvpilot-bench --url http://127.0.0.1:8000                   21 requests at once, prompts of 128, 512 and 2,048 tokens
  kvpilot-bench --url URL --concurrency 64 --requests 256     256 requests, 64 at any time
  kvpilot-bench --url URL --prompt-tokens 512 --max-tokens 1  time to first token alone
  kvpilot-bench --url URL --json run.json --png run.png       keep the result and a picture of it
  kvpilot-bench --url https://HOST/v1 --api-key KEY --model M --endpoint chat --no-ignore-eos    a hosted service

what the figures are:
  TTFT          from sending a request to the first text of its answer; queueing and reading the prompt are in it
  inter-token   between neighbouring pieces of a stream, all streams together
  tokens/s      of answers, as the server counts them in `usage`, over the whole run

Prompts are random words, another text for each request (no cache of prefixes helps), cut to exactly the wanted number
of tokens by the server's own /tokenize, or by its usage figures where it has none. Requests are greedy and, with
--ignore-eos (the default), run to --max-tokens; a server that does not know this field may need --no-ignore-eos.
One small request is sent before the clock starts. Nothing is retried.

exit code: 0 all requests succeeded, 1 some failed, 2 the run could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpilot_tools.bench.load import LiveCounts, LoadPlan, LoadResult, build_body, build_prompts, run_load
from kvpilot_tools.bench.memory_probe import Probe, ProcessProbe, ServerProbe, nvml_probe
from kvpilot_tools.bench.picture import write_picture
from kvpilot_tools.bench.prompts import Prompt, PromptSizeError, build_prompt, choose_counter
from kvpilot_tools.bench.streaming_client import RequestRecord, Target, base_url, stream_request

_LINE_PERIOD_S = 5.0
_REFRESHES_PER_S = 5
_WARM_UP_PROMPT_TOKENS = 16
_WARM_UP_OUTPUT_TOKENS = 2


class CannotStartError(Exception):
    """The run could not start; the text says why."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = build_parser().parse_args(argv)
    if options.png is not None and importlib.util.find_spec("matplotlib") is None:
        print("kvpilot-bench: --png needs matplotlib: pip install 'kvpilot-tools[bench]'", file=sys.stderr)
        return 2
    try:
        target, result = asyncio.run(measure(options))
    except (CannotStartError, PromptSizeError) as error:
        print(f"kvpilot-bench: {error}", file=sys.stderr)
        return 2
    report = {"server": {"url": target.url, "model": target.model, "endpoint": target.endpoint}, **result.as_json()}
    print_table(target, result, Console(width=100))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.png is not None:
        write_picture(result, options.png, _title(target, result))
    if options.json_line:
        print(json.dumps({key: value for key, value in report.items() if key != "records"}))
    return 1 if result.errors else 0


def build_parser() -> argparse.ArgumentParser:
    """The options of kvpilot-bench."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="kvpilot-bench",
        description=first.removeprefix("kvpilot-bench: "),
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1 (default: %(default)s)")
    add("--model", help="name to ask for (default: the first of /v1/models)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="default: %(default)s")
    add("--concurrency", type=_positive, default=21, metavar="N", help="requests in flight (default: %(default)s)")
    add("--requests", type=_positive, metavar="N", help="requests in all (default: as many as --concurrency)")
    add(
        "--prompt-tokens",
        type=_sizes,
        default=(128, 512, 2048),
        metavar="N,N,…",
        help="prompt lengths, taken in turn (default: 128,512,2048)",
    )
    add("--max-tokens", type=_sizes, default=(50,), metavar="N,N,…", help="answer lengths, in turn (default: 50)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of full length (default)")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts: the same seed sends the same (default: 0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (default: 600)")
    add("--pid", type=_positive, metavar="PID", help="also watch the memory of this process and its children")
    add("--gpu", type=int, metavar="INDEX", help="device whose memory NVML tells (default: 0 for a local server)")
    add("--json", type=Path, metavar="PATH", help="write the whole result, every request in it")
    add("--png", type=Path, metavar="PATH", help="write a picture of the run")
    add("--json-line", action="store_true", help="print the result, without single requests, as the last line")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


async def measure(options: argparse.Namespace) -> tuple[Target, LoadResult]:
    """Look at the server, make the prompts, warm up, run."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        url = base_url(options.url)
        target = Target(
            url=url,
            model=options.model or await find_model(session, url, options.api_key),
            api_key=options.api_key,
            endpoint=options.endpoint,
            timeout_s=options.timeout,
        )
        plan = LoadPlan(
            num_requests=options.requests or options.concurrency,
            concurrency=options.concurrency,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.max_tokens,
            ignores_eos=options.ignore_eos,
            temperature=options.temperature,
            seed=options.seed,
        )
        prompts = await prepare(session, target, plan)
        probes = await find_probes(session, target, options)
        with show_progress(f"{target.model} at {target.url}") as show:
            return target, await run_load(session, target, plan, prompts, probes=probes, on_counts=show)


async def prepare(session: aiohttp.ClientSession, target: Target, plan: LoadPlan) -> list[Prompt]:
    """Make the prompts and send one short request, so that a first request's own costs are not measured."""
    count_tokens = await choose_counter(session, target)
    prompts = await build_prompts(plan, count_tokens)
    rng = random.Random(plan.seed + 1)  # noqa: S311 - reproducible on purpose
    text = (await build_prompt(rng, _WARM_UP_PROMPT_TOKENS, count_tokens)).text
    record = RequestRecord(
        index=-1, wanted_prompt_tokens=_WARM_UP_PROMPT_TOKENS, wanted_output_tokens=_WARM_UP_OUTPUT_TOKENS, sent_s=0.0
    )
    body = build_body(target, plan, text, _WARM_UP_OUTPUT_TOKENS)
    await stream_request(session, target, body, record, run_began=time.perf_counter())
    if record.error not in (None, "no text"):
        hint = " (try --no-ignore-eos)" if "ignore_eos" in record.detail else ""
        raise CannotStartError(f"the first request failed: {record.error}: {record.detail}{hint}")
    return prompts


async def find_model(session: aiohttp.ClientSession, url: str, api_key: str | None) -> str:
    """The first model that the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise CannotStartError(f"{url}/v1/models answered {response.status}: {(await response.text())[:300]}")
            answer: Any = await response.json(content_type=None)
            return str(answer["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CannotStartError(f"no model from {url}/v1/models: {type(error).__name__}: {error}") from error


async def find_probes(session: aiohttp.ClientSession, target: Target, options: argparse.Namespace) -> list[Probe]:
    """Whatever can tell the server's memory."""
    probes: list[Probe] = []
    if options.pid is not None:
        probes.append(ProcessProbe(options.pid))
    server = ServerProbe(session, target)
    if await server.read() is not None:
        probes.append(server)
    if options.gpu is not None or target.is_local:
        gpu = nvml_probe(options.gpu or 0)
        if gpu is None and options.gpu is not None:
            raise CannotStartError(f"--gpu {options.gpu}: NVML does not tell of it (driver? nvidia-ml-py?)")
        if gpu is not None:
            probes.append(gpu)
    return probes


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[LiveCounts], None]]:
    """One line that follows the run on a terminal; elsewhere a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def print_now_and_then(counts: LiveCounts) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_PERIOD_S:
                last = time.monotonic()
                print(f"{title}: {counts.describe()}", file=sys.stderr, flush=True)

        yield print_now_and_then
        return
    shown: list[LiveCounts] = []

    def render() -> Text:
        return Text(f"{title}: {shown[0].describe()}" if shown else title)

    with Live(get_renderable=render, console=console, refresh_per_second=_REFRESHES_PER_S, transient=True):
        yield lambda counts: shown.append(counts) if not shown else None


def print_table(target: Target, result: LoadResult, console: Console) -> None:
    """The result for people."""
    report = result.as_json()
    table = Table(title=_title(target, result))
    for column in ("", "median", "p95", "p99", "mean", "largest"):
        table.add_column(column, justify="right" if column else "left")

    def add(name: str, summary: dict[str, float] | None) -> None:
        if summary is None:
            table.add_row(name, *["–"] * 5)
        else:
            table.add_row(name, *(f"{summary[key]:.3f} s" for key in ("median", "p95", "p99", "mean", "largest")))

    add("TTFT", report["ttft_s"])
    by_size = report["ttft_s_by_prompt_tokens"]
    if len(by_size) > 1:
        for size, summary in by_size.items():
            add(f"  prompts of {size}", summary)
    add("inter-token", report["inter_token_s"])
    add("whole request", report["request_s"])
    console.print(table)
    rates = report["throughput"]
    print(
        f"{rates['output_tokens_per_s']:.1f} tokens/s out, {rates['prompt_tokens_per_s']:.1f} prompt tokens/s, "
        f"{rates['requests_per_s']:.2f} requests/s, {result.duration_s:.1f} s in all"
    )
    for name, size in result.memory_peak_bytes.items():
        print(f"memory by {name}: {size / 2**20:.0f} MiB at the highest")
    failed = report["requests"]["failed"]
    print(f"{report['requests']['succeeded']} succeeded, {failed} failed", end="")
    print(f": {', '.join(f'{count} × {kind}' for kind, count in result.errors.items())}" if failed else "")
    if failed:
        print(f"the first error: {report['requests']['first_error']}")


def _title(target: Target, result: LoadResult) -> str:
    sizes = "/".join(str(size) for size in result.plan.prompt_tokens)
    outputs = "/".join(str(size) for size in result.plan.output_tokens)
    return (
        f"{target.model}: {result.plan.num_requests} requests, {result.plan.concurrency} at once, "
        f"prompts of {sizes}, {outputs} tokens out"
    )


if __name__ == "__main__":
    sys.exit(main())
