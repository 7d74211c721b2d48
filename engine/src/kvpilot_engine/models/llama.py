"""The Llama architecture: token ids in, hidden rows out, keys and values written on the way.

Not for scheduling, sampling or memory. Everything that a step is made of is an argument; the model holds weights only.
Every operation on rows gives each row the same bits whatever rows stand beside it (see layers/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpilot_engine.layers.attention import AttentionBackend, LayerKV, PlanT
from kvpilot_engine.layers.linear import pad_rows, tiled_linear
from kvpilot_engine.layers.norm import rms_norm, silu_and_mul
from kvpilot_engine.layers.rotary import RotaryEmbedding, rotary_frequencies, rotate
from kvpilot_engine.models.config import LlamaConfig
from kvpilot_engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights; matrices are [in, out], q/k/v and gate/up are joined."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaForCausalLM:
    """Weights and the two functions over them: forward and compute_logits."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        embedding: Tensor,
        layers: tuple[LlamaLayer, ...],
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
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._rotary = RotaryEmbedding(frequencies, max_positions)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: tuple[LayerKV, ...],
        attention: AttentionBackend[PlanT],
        plan: PlanT,
    ) -> Tensor:
        """Hidden rows [rows, hidden] after the last norm; rows are whole tiles, those past plan.num_rows padding."""
        shape, eps, num_rows = self.config.attention_shape, self.config.rms_norm_eps, plan.num_rows
        cos, sin = self._rotary.angles(positions)
        hidden = self._embedding.index_select(0, token_ids)
        attended = torch.zeros(token_ids.numel(), shape.num_heads * shape.head_dim)
        for layer, kv in zip(self._layers, kv_cache, strict=True):
            qkv = tiled_linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            heads = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
            rotated = rotate(heads[:, : shape.num_heads + shape.num_kv_heads], cos, sin)
            queries, keys = rotated[:num_rows, : shape.num_heads], rotated[:num_rows, shape.num_heads :]
            values = heads[:num_rows, shape.num_heads + shape.num_kv_heads :]
            attention.write_kv(kv, keys, values, plan)
            attended[:num_rows] = attention.forward(queries, kv, plan).flatten(1)
            hidden += tiled_linear(attended, layer.output, layer.output_bias)
            gate_up = tiled_linear(rms_norm(hidden, layer.post_attention_norm, eps), layer.gate_up)
            hidden += tiled_linear(silu_and_mul(gate_up), layer.down)
        return rms_norm(hidden, self._norm, eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of chosen hidden rows, any number of them."""
        return tiled_linear(pad_rows(hidden), self._head)[: hidden.shape[0]]


def load_llama(
    source: WeightSource, *, max_positions: int, on_progress: Callable[[int, int], None] | None = None
) -> LlamaForCausalLM:
    """Read all weights; on_progress gets (layers done, layers) after each one."""
    config = source.config

    def matrix(*names: str) -> Tensor:
        # .t() of the joined [out, in] weights, made contiguous one part at a time: the peak is one matrix, not three
        parts = [source.read(f"{name}.weight").t() for name in names]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()

    def bias(*names: str) -> Tensor | None:
        return torch.cat([source.read(f"{name}.bias") for name in names]) if config.attention_bias else None

    embedding = source.read("model.embed_tokens.weight")
    layers: list[LlamaLayer] = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        projections = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        layers.append(
            LlamaLayer(
                input_norm=source.read(f"{prefix}.input_layernorm.weight"),
                qkv=matrix(*projections),
                qkv_bias=bias(*projections),
                output=matrix(f"{prefix}.self_attn.o_proj"),
                output_bias=bias(f"{prefix}.self_attn.o_proj"),
                post_attention_norm=source.read(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=matrix(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
                down=matrix(f"{prefix}.mlp.down_proj"),
            )
        )
        if on_progress is not None:
            on_progress(index + 1, config.num_layers)
    return LlamaForCausalLM(
        config,
        embedding=embedding,
        layers=tuple(layers),
        norm=source.read("model.norm.weight"),
        head=None if config.tie_word_embeddings else matrix("lm_head"),
        max_positions=max_positions,
    )
