"""How each server of the benchmark is started: the same model, the same threads, the same room for keys and values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpilot_tools.bench.peer_layout import PeerLayout

SERVED_NAME = "bench"
MAX_MODEL_LEN = 4096
MAX_SEQUENCES = 32
KV_GIB = 2
LLAMACPP_TOKENS_PER_SLOT = 2304
"""A prompt of 2,048 and its answer; 32 times that is the 2 GiB that the others get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server as a command; `{port}` in it is filled in at the start."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    start_limit_s: float = 180.0


def kvpilot_spec(model: Path, *, num_threads: int, flags: tuple[str, ...] = ()) -> ServerSpec:
    return ServerSpec(
        name="kvpilot",
        argv=(
            *(sys.executable, "-m", "kvpilot_engine", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", SERVED_NAME),
            *("--num-threads", str(num_threads), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--kv-cache-memory-bytes", f"{KV_GIB}GiB"),
            *flags,
        ),
        ready_path="/readyz",
    )


def llamacpp_spec(layout: PeerLayout, model: Path, *, num_threads: int, uses_amx: bool = True) -> ServerSpec:
    """llama-server with a slot for each stream; keys and values of each slot apart, flash attention on.

    `uses_amx` False keeps weights in the file's layout, which for Q4_1 means: all as before, but without AMX.
    """
    return ServerSpec(
        name="llamacpp" if uses_amx else "llamacpp-no-amx",
        argv=(
            *(str(layout.llama_server), "--model", str(model), "--alias", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", "{port}", "--no-ui", "--offline"),
            *("--threads", str(num_threads), "--threads-batch", str(num_threads)),
            *("--parallel", str(MAX_SEQUENCES), "--ctx-size", str(MAX_SEQUENCES * LLAMACPP_TOKENS_PER_SLOT)),
            *("--no-kv-unified", "--flash-attn", "on", "--cont-batching"),
            *(() if uses_amx else ("--no-repack",)),
        ),
    )


def vllm_spec(layout: PeerLayout, model: Path, *, num_threads: int) -> ServerSpec:
    """vLLM in bfloat16 on the folder written from the same file: it reads no GGUF on CPU."""
    return ServerSpec(
        name="vllm",
        argv=(
            *(str(layout.python(layout.vllm)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(layout.hf_folder(model)), "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)),
        ),
        env={
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
            "VLLM_CACHE_ROOT": str(layout.vllm_cache),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
        start_limit_s=600.0,
    )
