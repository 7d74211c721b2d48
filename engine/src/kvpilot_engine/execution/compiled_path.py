"""The compiled kernels as a ComputePath: packed weights, half-precision KV cache, an arena. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

import numba

from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.compiled_model_runner import CompiledModelRunner
from kvpilot_engine.execution.compiled_weights import (
    CompiledWeights,
    layouts_of,
    load_compiled_weights,
    weights_bytes,
)
from kvpilot_engine.execution.compiled_workspace import CompiledWorkspace
from kvpilot_engine.execution.compute_path import OnCount
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.paged_kv_storage import KVDtype, PagedKVStorage, check_block_layout, choose_kv_dtype
from kvpilot_engine.execution.sampler_peak import sampler_bound_bytes
from kvpilot_engine.kernels.compile_ahead import compile_decoder_parts
from kvpilot_engine.kernels.compile_attention import compile_attention
from kvpilot_engine.kernels.compile_sampling import compile_sampling
from kvpilot_engine.kernels.cpu_features import multiplies_tiles
from kvpilot_engine.kernels.paged_attention import HeadLayout
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.weight_source import WeightSource


class CompiledPath:
    """ComputePath on numba kernels."""

    def __init__(self, *, kv_cache_dtype: str = "auto", block_size: int = 16, quantize_plain: bool = False) -> None:
        """SettingsError for keys and values in a form that can't be computed with here."""
        self._in_tiles = multiplies_tiles()
        self._kv_dtype = choose_kv_dtype(kv_cache_dtype, block_size, has_tiles=self._in_tiles)
        self._quantize_plain = quantize_plain
        self._weights: CompiledWeights | None = None
        self._workspace: tuple[tuple[int, int], CompiledWorkspace] | None = None
        """With the rows and the block size that it was made for."""

    @property
    def arithmetic(self) -> str:
        weights = "int8" if self._quantize_plain else "stored"
        linears = "bfloat16" if self._in_tiles else "int8"
        return f"compiled weights={weights} linears={linears} kv={self._kv_dtype}"

    def open_thread_pools(self, num_threads: int) -> None:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]

    def check(self, config: DecoderConfig, block_size: int) -> None:
        check_block_layout(config, block_size)

    def weights_bytes(self, source: WeightSource, *, max_positions: int) -> int:
        return weights_bytes(
            source, max_positions=max_positions, quantize_plain=self._quantize_plain, in_tiles=self._in_tiles
        )

    def kv_bytes_per_block(self, config: DecoderConfig, block_size: int) -> int:
        return config.kv_bytes_per_token(self._kv_dtype.element_bytes) * block_size

    def activation_bound_bytes(self, config: DecoderConfig, scheduler: SchedulerSettings, max_model_len: int) -> int:
        """The arena and what sampling takes; the step's own index arrays are bounded by a table a sequence."""
        # the arrays are not touched, so they take no memory
        arena = _allocate(
            config, scheduler.max_num_batched_tokens, 16, self._kv_dtype, in_tiles=self._in_tiles
        ).size_bytes
        tables = 2 * 8 * scheduler.max_num_seqs * max_model_len // 8
        return arena + tables + sampler_bound_bytes(config.vocab_size)

    def compile_kernels(self, source: WeightSource) -> Callable[[], None]:
        layouts = layouts_of(source, quantize_plain=self._quantize_plain, in_tiles=self._in_tiles)
        activation = str(source.config.activation)

        def compile_all() -> None:
            compile_decoder_parts(layouts, [activation])
            compile_attention(self._kv_dtype.kind)
            compile_sampling()

        return compile_all

    def load_weights(self, source: WeightSource, *, max_positions: int, on_progress: OnCount) -> None:
        self._weights = load_compiled_weights(
            source,
            max_positions=max_positions,
            quantize_plain=self._quantize_plain,
            in_tiles=self._in_tiles,
            on_progress=on_progress,
        )

    def make_runner(
        self,
        scheduler: SchedulerSettings,
        *,
        num_blocks: int,
        block_size: int,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> CompiledModelRunner:
        assert self._weights is not None, "make_runner before load_weights"
        config = self._weights.config
        kv_cache = PagedKVStorage(config, num_blocks=num_blocks, block_size=block_size, dtype=self._kv_dtype)
        size = (scheduler.max_num_batched_tokens, block_size)
        if self._workspace is None or self._workspace[0] != size:
            self._workspace = None  # never two at a time
            self._workspace = (size, _allocate(config, *size, self._kv_dtype, in_tiles=self._in_tiles))
        return CompiledModelRunner(self._weights, kv_cache, self._workspace[1], memory, faults)


def _allocate(
    config: DecoderConfig, max_rows: int, block_size: int, kv_dtype: KVDtype, *, in_tiles: bool
) -> CompiledWorkspace:
    layout = HeadLayout(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        in_tiles=kv_dtype is KVDtype.BFLOAT16,
    )
    return CompiledWorkspace.allocate(
        config, layout, max_rows=max_rows, num_threads=numba.get_num_threads(), in_tiles=in_tiles
    )
