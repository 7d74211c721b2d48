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
from kvpilot_engine.kernels.kv_write import rotate_and_store
from kvpilot_engine.kernels.linear import gated_linear
from kvpilot_engine.kernels.packed_rows import read_rows
from kvpilot_engine.kernels.paged_attention import attend, plan_items
from kvpilot_engine.kernels.rms_norm import rms_norm
from kvpilot_engine.models.decoder_config import Activation


class CompiledDecoder:
    """Weights, KV storage and workspace; a StepDecoder."""

    def __init__(self, weights: CompiledWeights, kv_cache: PagedKVStorage, workspace: CompiledWorkspace) -> None:
        self._weights = weights
        self._config = weights.config
        self._kv_cache = kv_cache
        self._workspace = workspace
        self._rows = workspace
        """The workspace as the last forward used it: cut to its rows."""
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
        hidden, projected, normed = space.hidden, space.projected, space.normed
        self._embed(inputs.token_ids, hidden)
        items = self._plan_attention(inputs)
        has_addend = False
        for layer, kv in zip(self._weights.layers, self._kv_cache.layers, strict=True):
            if has_addend:
                normed.add_and_normalize(hidden, projected, layer.attention_norm, eps)
            else:
                normed.normalize(hidden, layer.attention_norm, eps)
            self._attend(layer, kv, inputs, items)
            if config.post_norms:
                rms_norm(projected, layer.attention_post_norm, eps, projected)
            normed.add_and_normalize(hidden, projected, layer.mlp_norm, eps)
            self._feed_forward(layer)
            if config.post_norms:
                rms_norm(projected, layer.mlp_post_norm, eps, projected)
            has_addend = True

    def compute_logits(self, rows: Integers) -> Floats:
        """At most rows_of_logits(vocabulary) rows."""
        count = len(rows)
        head = self._workspace.head.first(count)
        # the last layer's output was not added yet: only these rows need it
        np.add(self._rows.hidden[rows], self._rows.projected[rows], out=head.rows)
        head.normalize(head.rows, self._weights.norm, self._config.rms_norm_eps)
        copies = 1 if head.rest is None else 2
        logits = head.multiply_precisely(self._weights.head, self._workspace.logits[: copies * count])
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
        qkv = space.normed.multiply_precisely(layer.qkv, space.qkv)
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
            space.attended.rows,
        )
        space.attended.convert()
        space.attended.multiply(layer.output, space.projected)

    def _feed_forward(self, layer: CompiledLayer) -> None:
        space, activation = self._rows, self._config.activation
        if layer.is_gated_in_turn and space.normed.tiles is not None and space.gated.tiles is not None:
            is_gelu = activation is Activation.GELU_TANH
            gated_linear(layer.gate_up, space.normed.tiles, space.gated.tiles, is_gelu=is_gelu)
        else:
            space.normed.multiply(layer.gate_up, space.gate_up)
            space.gated.gate(space.gate_up, activation)
        space.gated.multiply(layer.down, space.projected)
