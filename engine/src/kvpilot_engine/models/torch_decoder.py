"""Any DecoderConfig in plain torch, float32: token ids in, hidden rows out, keys and values written on the way.

The exact reference of every other path. Not for scheduling, sampling or memory: everything that a step is made of is an
argument, the decoder holds weights only. Every operation on rows gives each row the same bits whatever rows stand
beside it (see layers/). The only module of models/ that imports torch; import it where the float32 path is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpilot_engine.layers.attention import AttentionBackend, AttentionShape, LayerKV, PlanT
from kvpilot_engine.layers.linear import pad_rows, tiled_linear
from kvpilot_engine.layers.norm import gelu_tanh_and_mul, rms_norm, silu_and_mul, softcap
from kvpilot_engine.layers.rotary import RotaryEmbedding, rotate
from kvpilot_engine.models.decoder_config import Activation, DecoderConfig, RopeConfig
from kvpilot_engine.models.rotary_tables import rotary_tables
from kvpilot_engine.models.weight_source import WeightSource

_GATED = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_tanh_and_mul}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer's weights; matrices are [in, out], q/k/v and gate/up are joined. What the model lacks is None."""

    rope: RopeConfig
    window: int | None
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_post_norm: Tensor | None


class TorchDecoder:
    """Weights and the two functions over them: forward and compute_logits."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        norm: Tensor,
        head: Tensor | None,
        max_positions: int,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        # a view: the tied head is the embedding itself, without a second copy
        self._head = embedding.t() if head is None else head
        self._rotary = {
            rope: RotaryEmbedding(*map(torch.from_numpy, rotary_tables(rope, max_positions)))
            for rope in {layer.rope for layer in layers}
        }
        self._gated = _GATED[config.activation]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: tuple[LayerKV, ...],
        attention: AttentionBackend[PlanT],
        plan: PlanT,
    ) -> Tensor:
        """Hidden rows [rows, hidden] after the last norm; rows are whole tiles, those past plan.num_rows padding."""
        config, num_rows = self.config, plan.num_rows
        eps, rotated_heads = config.rms_norm_eps, config.num_heads + config.num_kv_heads
        angles = {rope: rotary.angles(positions) for rope, rotary in self._rotary.items()}
        hidden = self._embedding.index_select(0, token_ids)
        if config.embedding_scale != 1.0:
            hidden *= config.embedding_scale
        attended = torch.zeros(token_ids.numel(), config.query_size)
        for layer, kv in zip(self._layers, kv_cache, strict=True):
            qkv = tiled_linear(rms_norm(hidden, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
            heads = qkv.view(-1, rotated_heads + config.num_kv_heads, config.head_dim)
            rotated = rotate(self._normalize_heads(heads[:, :rotated_heads], layer), *angles[layer.rope])
            queries, keys = rotated[:num_rows, : config.num_heads], rotated[:num_rows, config.num_heads :]
            attention.write_kv(kv, keys, heads[:num_rows, rotated_heads:], plan)
            attended[:num_rows] = attention.forward(queries, kv, plan, layer.window).flatten(1)
            output = tiled_linear(attended, layer.output, layer.output_bias)
            hidden += output if layer.attention_post_norm is None else rms_norm(output, layer.attention_post_norm, eps)
            gate_up = tiled_linear(rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up)
            output = tiled_linear(self._gated(gate_up), layer.down)
            hidden += output if layer.mlp_post_norm is None else rms_norm(output, layer.mlp_post_norm, eps)
        return rms_norm(hidden, self._norm, eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of chosen hidden rows, any number of them."""
        logits = tiled_linear(pad_rows(hidden), self._head)[: hidden.shape[0]]
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)

    def _normalize_heads(self, heads: Tensor, layer: DecoderLayer) -> Tensor:
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        num_heads, eps = self.config.num_heads, self.config.rms_norm_eps
        queries, keys = heads[:, :num_heads], heads[:, num_heads:]
        return torch.cat([rms_norm(queries, layer.q_norm, eps), rms_norm(keys, layer.k_norm, eps)], dim=1)


def attention_shape(config: DecoderConfig) -> AttentionShape:
    """What an attention backend has to know of a decoder."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        windows=tuple(dict.fromkeys(layer.window for layer in config.layers)),
    )


def load_torch_decoder(
    source: WeightSource, *, max_positions: int, on_progress: Callable[[int, int], None] | None = None
) -> TorchDecoder:
    """Read all weights; on_progress gets (layers done, layers) after each one."""
    config = source.config

    def read(name: str) -> Tensor:
        return torch.from_numpy(source.read(name))

    def matrix(*names: str) -> Tensor:
        # .t() of the joined [out, in] weights, made contiguous one part at a time: the peak is one matrix, not three
        parts = [read(f"{name}.weight").t() for name in names]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()

    layers: list[DecoderLayer] = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}"
        projections = [f"{prefix}.{name}" for name in "qkv"]
        layers.append(
            DecoderLayer(
                rope=layer.rope,
                window=layer.window,
                attention_norm=read(f"{prefix}.attention_norm.weight"),
                qkv=matrix(*projections),
                qkv_bias=torch.cat([read(f"{name}.bias") for name in projections]) if config.qkv_bias else None,
                q_norm=read(f"{prefix}.q_norm.weight") if config.qk_norm else None,
                k_norm=read(f"{prefix}.k_norm.weight") if config.qk_norm else None,
                output=matrix(f"{prefix}.o"),
                output_bias=read(f"{prefix}.o.bias") if config.output_bias else None,
                attention_post_norm=read(f"{prefix}.attention_post_norm.weight") if config.post_norms else None,
                mlp_norm=read(f"{prefix}.mlp_norm.weight"),
                gate_up=matrix(f"{prefix}.gate", f"{prefix}.up"),
                down=matrix(f"{prefix}.down"),
                mlp_post_norm=read(f"{prefix}.mlp_post_norm.weight") if config.post_norms else None,
            )
        )
        if on_progress is not None:
            on_progress(index + 1, config.num_layers)
    return TorchDecoder(
        config,
        embedding=read("embedding.weight"),
        layers=tuple(layers),
        norm=read("norm.weight"),
        head=None if config.tie_word_embeddings else matrix("head"),
        max_positions=max_positions,
    )
