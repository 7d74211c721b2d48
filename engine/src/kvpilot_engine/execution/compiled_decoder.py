"""Any DecoderConfig on the compiled kernels: a step's rows in, keys and values written, logits of chosen rows out.

Not for scheduling or sampling, nor for arithmetic (kernels/). Invariant: every kernel gives a row the same bits
whatever rows stand beside it, so a request's logits do not depend on its batch, on chunks, or on preemption.
"""

from __future__ import annotations

import numpy as np

from kvpilot_engine.execution.batch_inputs import BatchInputs, Integers
from kvpilot_engine.execution.compiled_weights import CompiledLayer, CompiledWeights
from kvpilot_engine.execution.compiled_workspace import CompiledWorkspace, Floats
from kvpilot_engine.execution.paged_kv_storage import PagedKVStorage, PagedLayerKV
from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
from kvpilot_engine.kernels.gated_activation import gelu_tanh_mul_quantize, silu_mul_quantize
from kvpilot_engine.kernels.kv_write import rotate_and_store
from kvpilot_engine.kernels.linear import linear
from kvpilot_engine.kernels.packed_rows import read_rows
from kvpilot_engine.kernels.paged_attention import attend, plan_items
from kvpilot_engine.kernels.precise_linear import precise_linear
from kvpilot_engine.kernels.rms_norm import add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kvpilot_engine.models.decoder_config import Activation

_GATED = {Activation.SILU: silu_mul_quantize, Activation.GELU_TANH: gelu_tanh_mul_quantize}


class CompiledDecoder:
    """Weights, KV storage and workspace; a StepDecoder."""

    def __init__(self, weights: CompiledWeights, kv_cache: PagedKVStorage, workspace: CompiledWorkspace) -> None:
        self._weights = weights
        self._config = weights.config
        self._kv_cache = kv_cache
        self._workspace = workspace
        self._rows = workspace
        """The workspace as the last forward used it: cut to its rows."""
        self._gated = _GATED[weights.config.activation]
        layout = kv_cache.layout
        self._layout = (layout.heads_per_kv, layout.head_dim, layout.block_size, layout.lanes)

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def forward(self, inputs: BatchInputs) -> None:
        """The last layer's residual stays in the workspace; compute_logits takes it from there."""
        if inputs.num_rows != len(self._rows.hidden):
            self._rows = self._workspace.first(inputs.num_rows)
        config, space = self._config, self._rows
        eps = config.rms_norm_eps
        hidden, projected, normed, quantized = space.hidden, space.projected, space.normed, space.normed_quantized
        self._embed(inputs.token_ids, hidden)
        items = self._plan_attention(inputs)
        has_addend = False
        for layer, kv in zip(self._weights.layers, self._kv_cache.layers, strict=True):
            if has_addend:
                _add_and_normalize(hidden, projected, layer.attention_norm, eps, normed, quantized)
            else:
                rms_norm_quantize(hidden, layer.attention_norm, eps, normed, quantized.values, quantized.groups)
            self._attend(layer, kv, inputs, items)
            if config.post_norms:
                rms_norm(projected, layer.attention_post_norm, eps, projected)
            _add_and_normalize(hidden, projected, layer.mlp_norm, eps, normed, quantized)
            self._feed_forward(layer)
            if config.post_norms:
                rms_norm(projected, layer.mlp_post_norm, eps, projected)
            has_addend = True

    def compute_logits(self, rows: Integers) -> Floats:
        """At most rows_of_logits(vocabulary) rows."""
        space, count = self._workspace, len(rows)
        chosen, quantized = space.head_input[:count], space.head_quantized.first(2 * count)
        # the last layer's output was not added yet: only these rows need it
        np.add(self._rows.hidden[rows], self._rows.projected[rows], out=chosen)
        rms_norm_quantize(
            chosen, self._weights.norm, self._config.rms_norm_eps, chosen, quantized.values, quantized.groups
        )
        rest, twice = space.head_rest[:count], space.logits[: 2 * count]
        logits = precise_linear(self._weights.head, chosen, quantized, rest, twice)
        if self._config.logit_softcap is not None:
            logits /= np.float32(self._config.logit_softcap)
            np.tanh(logits, out=logits)
            logits *= np.float32(self._config.logit_softcap)
        return logits

    def _embed(self, token_ids: Integers, hidden: Floats) -> None:
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise IndexError(f"token ids must be between 0 and {self.vocab_size - 1}")
        read_rows(self._weights.embedding, token_ids, hidden)
        if self._config.embedding_scale != 1.0:
            hidden *= np.float32(self._config.embedding_scale)

    def _plan_attention(self, inputs: BatchInputs) -> Integers:
        """Items of work, the longest first, so that no thread is left with one at the end."""
        items = self._workspace.items
        layout = self._kv_cache.layout
        count = plan_items(inputs.query_start, inputs.seq_lens, layout.rows_per_item, items)
        planned = items[:count]
        work = planned[:, 2] * (planned[:, 3] + planned[:, 2])
        return planned[np.argsort(-work, kind="stable")]

    def _attend(self, layer: CompiledLayer, kv: PagedLayerKV, inputs: BatchInputs, items: Integers) -> None:
        config, space = self._config, self._rows
        qkv = precise_linear(layer.qkv, space.normed, space.normed_quantized, space.rest, space.qkv)
        rotate_and_store(
            qkv,
            inputs.positions,
            inputs.slot_mapping,
            layer.cos,
            layer.sin,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            kv.keys,
            kv.values,
            self._layout,
        )
        attend(
            qkv,
            kv.keys,
            kv.values,
            inputs.block_tables,
            items,
            self._layout,
            config.attention_scale,
            config.attention_softcap or 0.0,
            layer.window,
            space.attention_scratch,
            space.attention_runs,
            space.next_item,
            space.attended,
        )
        quantized = space.attended_quantized
        quantize_rows(space.attended, quantized.values, quantized.groups)
        linear(layer.output, space.attended, quantized, space.projected)

    def _feed_forward(self, layer: CompiledLayer) -> None:
        space = self._rows
        quantized = space.gated_quantized
        linear(layer.gate_up, space.normed, space.normed_quantized.first(len(space.normed)), space.gate_up)
        self._gated(space.gate_up, space.gated, quantized.values, quantized.groups)
        linear(layer.down, space.gated, quantized, space.projected)


def _add_and_normalize(
    hidden: Floats, addend: Floats, weight: Floats, eps: float, normed: Floats, quantized: QuantizedRows
) -> None:
    add_rms_norm_quantize(hidden, addend, weight, eps, normed, quantized.values, quantized.groups)
