"""The float32 reference as a ComputePath. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.compute_path import OnCount
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.kv_cache_tensors import KVCacheTensors, kv_bytes_per_block
from kvpilot_engine.execution.sampler_peak import sampler_bound_bytes
from kvpilot_engine.execution.step_runner import rows_of_logits
from kvpilot_engine.execution.torch_model_runner import TorchModelRunner
from kvpilot_engine.kernels.compile_sampling import compile_sampling
from kvpilot_engine.layers.linear import padded_rows
from kvpilot_engine.layers.torch_attention import KEY_GROUP, MAX_PAIRS, QUERY_TILE
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.tensor_shapes import count_parameters
from kvpilot_engine.models.torch_decoder import TorchDecoder, load_torch_decoder
from kvpilot_engine.models.weight_source import WeightSource

_FLOAT = 4
_INDEX = 8


class TorchPath:
    """ComputePath in float32 throughout."""

    arithmetic = "float32"

    def __init__(self) -> None:
        self._model: TorchDecoder | None = None

    def open_thread_pools(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.mm(torch.zeros(512, 512), torch.zeros(512, 512))
        torch.zeros(1 << 20).add_(1.0)

    def check(self, config: DecoderConfig, block_size: int) -> None:
        """Any model that can be read, any block size."""

    def weights_bytes(self, source: WeightSource, *, max_positions: int) -> int:
        config = source.config
        # rotary tables are part of the weights' lifetime
        ropes = {layer.rope for layer in config.layers}
        tables = sum(2 * max_positions * (rope.rotary_dim // 2) * _FLOAT for rope in ropes)
        return count_parameters(config) * _FLOAT + tables

    def kv_bytes_per_block(self, config: DecoderConfig, block_size: int) -> int:
        return kv_bytes_per_block(config, block_size)

    def activation_bound_bytes(self, config: DecoderConfig, scheduler: SchedulerSettings, max_model_len: int) -> int:
        """Sum of the tensors that live at once in the widest moment of a step; each term an upper bound."""
        rows = padded_rows(scheduler.max_num_batched_tokens)
        query_width, kv_width = config.query_size, config.kv_size
        # hidden, normed, attended and one matrix product's input and output; the gated activation holds two halves more
        in_layer = (
            rows * (4 * config.hidden_size + max(4 * query_width + 4 * kv_width, 5 * config.intermediate_size)) * _FLOAT
        )
        longest_groups = -(-max_model_len // KEY_GROUP)
        pairs = max(MAX_PAIRS, longest_groups)
        tile_heads = QUERY_TILE * config.heads_per_kv
        # gathered keys or values, then per pair: queries or weighted values, scores and their copy
        per_pair = config.num_kv_heads * (KEY_GROUP + 2 * tile_heads) * config.head_dim * _FLOAT
        per_pair += 2 * config.num_kv_heads * tile_heads * (KEY_GROUP + 2) * _FLOAT
        tiles = -(-scheduler.max_num_batched_tokens // QUERY_TILE) + scheduler.max_num_seqs
        planned = (
            tiles
            * longest_groups
            * (config.num_kv_heads * KEY_GROUP * _INDEX * 2 + QUERY_TILE * KEY_GROUP + 2 * _INDEX)
        )
        logits = padded_rows(rows_of_logits(config.vocab_size)) * (config.vocab_size + 2 * config.hidden_size) * _FLOAT
        return in_layer + pairs * per_pair + planned + logits + sampler_bound_bytes(config.vocab_size)

    def compile_kernels(self, source: WeightSource) -> Callable[[], None]:  # noqa: ARG002  torch brings its own
        return compile_sampling

    def load_weights(self, source: WeightSource, *, max_positions: int, on_progress: OnCount) -> None:
        self._model = load_torch_decoder(source, max_positions=max_positions, on_progress=on_progress)

    def make_runner(
        self,
        scheduler: SchedulerSettings,  # noqa: ARG002  torch allocates what a step needs
        *,
        num_blocks: int,
        block_size: int,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> TorchModelRunner:
        assert self._model is not None, "make_runner before load_weights"
        kv_cache = KVCacheTensors(self._model.config, num_blocks=num_blocks, block_size=block_size)
        return TorchModelRunner(self._model, kv_cache, memory, faults)
