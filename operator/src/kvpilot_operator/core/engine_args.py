"""The engine's command line for a spec, in the engine's (vLLM's) flag names.

The share of the device's memory is not among the flags: it comes from the tuning file, from the first start on, so that
changing it never replaces a pod. Flags whose field says `auto`, or nothing, are left to the engine.
"""

from __future__ import annotations

from kvpilot_operator.core.api_types import DType, KVCacheDType, LLMDeploymentSpec, Quantization
from kvpilot_operator.core.model_source import parse_model_source
from kvpilot_operator.core.naming import PORT, STATE_DIR, TUNING_FILE

ENGINE_COMMAND = ("python3", "-m", "kvpilot_engine")
"""Not the console script: this works in the image and on a mounted source tree alike."""

OWNED_FLAGS = (
    "--model",
    "--served-model-name",
    "--revision",
    "--host",
    "--port",
    "--api-key",
    "--device",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--block-size",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--tensor-parallel-size",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--tuning-file",
    "--state-dir",
    "--termination-log",
    "--drain-timeout",
    "--pod-uid",
    "-q",
    "-tp",
)
"""What `spec.engine.extraArgs` may not hold, short forms included; the schema refuses the same ones."""


def build_engine_args(spec: LLMDeploymentSpec, name: str) -> list[str]:
    """`name` is the object's, which is the served name where the spec gives none."""
    engine = spec.engine
    source = parse_model_source(spec.model.source)
    args = ["--model", source.model]
    args += ["--served-model-name", *(spec.model.served_names or (name,))]
    args += ["--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - a pod serves its network
    args += ["--device", engine.device]
    if engine.dtype is not DType.AUTO:
        args += ["--dtype", engine.dtype]
    if engine.quantization is not Quantization.AUTO:
        args += ["--quantization", engine.quantization]
    if engine.kv_cache_dtype is not KVCacheDType.AUTO:
        args += ["--kv-cache-dtype", engine.kv_cache_dtype]
    args += ["--block-size", str(engine.block_size)]
    if engine.max_model_len is not None:
        args += ["--max-model-len", str(engine.max_model_len)]
    args += ["--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_num_batched_tokens is not None:
        args += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.tensor_parallel_size > 1:
        args += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    args += ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]
    args += ["--tuning-file", TUNING_FILE, "--state-dir", STATE_DIR]
    args += ["--drain-timeout", str(spec.drain.timeout_seconds)]
    return [str(arg) for arg in args] + list(engine.extra_args)
