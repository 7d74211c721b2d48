"""A decoder's weights as the compiled path keeps them: packed matrices for the linear kernels, norms as float32.

Not for arithmetic. What the checkpoint stores is kept exactly, unless plain numbers are asked to become 8 bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.packed_matrix import (
    LAYOUTS,
    OUTPUTS,
    PackedMatrix,
    RawMatrix,
    layout_for,
    pack_matrices,
    packed_size_bytes,
)
from kvpilot_engine.kernels.weight_memory import WeightMemory
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.rotary_tables import rotary_tables
from kvpilot_engine.models.tensor_shapes import tensor_shapes
from kvpilot_engine.models.weight_source import WeightSource

Floats = npt.NDArray[np.float32]
_NONE = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayer:
    """One layer; norms that the model lacks are empty. q, k and v are one matrix, gate and up another."""

    window: int
    """0: all tokens."""
    cos: Floats
    sin: Floats
    attention_norm: Floats
    qkv: PackedMatrix
    q_norm: Floats
    k_norm: Floats
    output: PackedMatrix
    attention_post_norm: Floats
    mlp_norm: Floats
    gate_up: PackedMatrix
    is_gated_in_turn: bool
    """Blocks of gate and up follow each other in turn: the linear can multiply what comes out (gated_linear)."""
    down: PackedMatrix
    mlp_post_norm: Floats

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWeights:
    config: DecoderConfig
    embedding: PackedMatrix
    layers: tuple[CompiledLayer, ...]
    norm: Floats
    head: PackedMatrix
    """The embedding itself where the two are tied."""


def load_compiled_weights(
    source: WeightSource,
    *,
    max_positions: int,
    quantize_plain: bool,
    in_tiles: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> CompiledWeights:
    """Read and pack all weights; on_progress gets (layers done, layers) after each one."""
    config = source.config
    tables = {rope: rotary_tables(rope, max_positions) for rope in {layer.rope for layer in config.layers}}

    memory = WeightMemory(weights_bytes(source, max_positions=0, quantize_plain=quantize_plain, in_tiles=in_tiles))

    def read(name: str) -> RawMatrix:
        stored = source.read_stored(f"{name}.weight")
        return RawMatrix(str(stored.storage), stored.num_rows, stored.num_columns, stored.data)

    def pack_raw(matrices: list[RawMatrix], biases: list[Floats] | None = None) -> PackedMatrix:
        return pack_matrices(matrices, biases or (), quantize_plain=quantize_plain, in_tiles=in_tiles, memory=memory)

    def pack(*names: str, has_bias: bool = False) -> PackedMatrix:
        biases = [source.read(f"{name}.bias") for name in names] if has_bias else None
        return pack_raw([read(name) for name in names], biases)

    def pack_gate_up(prefix: str) -> tuple[PackedMatrix, bool]:
        """And whether blocks of the two follow each other in turn."""
        gate, up = read(f"{prefix}.gate"), read(f"{prefix}.up")
        layout = LAYOUTS[layout_for(gate.storage, quantize_plain=quantize_plain, in_tiles=in_tiles)]
        if layout.in_tiles and gate.storage == up.storage and gate.num_rows % (2 * OUTPUTS) == 0:
            return pack_raw([_take_turns(gate, up)]), True
        return pack_raw([gate, up]), False

    def norm(name: str, *, exists: bool = True) -> Floats:
        return source.read(f"{name}.weight") if exists else _NONE

    layers: list[CompiledLayer] = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}"
        cos, sin = tables[layer.rope]
        gate_up, is_gated_in_turn = pack_gate_up(prefix)
        layers.append(
            CompiledLayer(
                window=layer.window or 0,
                cos=cos,
                sin=sin,
                attention_norm=norm(f"{prefix}.attention_norm"),
                qkv=pack(*(f"{prefix}.{name}" for name in "qkv"), has_bias=config.qkv_bias),
                q_norm=norm(f"{prefix}.q_norm", exists=config.qk_norm),
                k_norm=norm(f"{prefix}.k_norm", exists=config.qk_norm),
                output=pack(f"{prefix}.o", has_bias=config.output_bias),
                attention_post_norm=norm(f"{prefix}.attention_post_norm", exists=config.post_norms),
                mlp_norm=norm(f"{prefix}.mlp_norm"),
                gate_up=gate_up,
                is_gated_in_turn=is_gated_in_turn,
                down=pack(f"{prefix}.down"),
                mlp_post_norm=norm(f"{prefix}.mlp_post_norm", exists=config.post_norms),
            )
        )
        if on_progress is not None:
            on_progress(index + 1, config.num_layers)
    embedding = pack("embedding")
    return CompiledWeights(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=norm("norm"),
        head=embedding if config.tie_word_embeddings else pack("head"),
    )


def _take_turns(gate: RawMatrix, up: RawMatrix) -> RawMatrix:
    """Sixteen rows of one, sixteen of the other, and so on."""
    blocks = [matrix.data.reshape(-1, 1, OUTPUTS, matrix.data.shape[1]) for matrix in (gate, up)]
    rows = np.concatenate(blocks, axis=1).reshape(-1, gate.data.shape[1])
    return RawMatrix(gate.storage, len(rows), gate.num_columns, rows)


def weights_bytes(source: WeightSource, *, max_positions: int, quantize_plain: bool, in_tiles: bool) -> int:
    """What load_compiled_weights will hold, told by the checkpoint's header alone."""
    config = source.config
    total = sum(2 * 4 * max_positions * (rope.rotary_dim // 2) for rope in {layer.rope for layer in config.layers})
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            total += 4 * shape[0]
        else:
            storage = str(source.read_stored(name).storage)
            total += packed_size_bytes(storage, *shape, quantize_plain=quantize_plain, in_tiles=in_tiles)
    return total


def layouts_of(source: WeightSource, *, quantize_plain: bool, in_tiles: bool) -> frozenset[int]:
    """The layouts that the matrices will have, told by the checkpoint's header alone: kernels can be compiled early."""
    matrices = (name for name, shape in tensor_shapes(source.config).items() if len(shape) > 1)
    return frozenset(
        layout_for(str(source.read_stored(name).storage), quantize_plain=quantize_plain, in_tiles=in_tiles)
        for name in matrices
    )
