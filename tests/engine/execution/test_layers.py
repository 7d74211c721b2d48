"""Layers against plain formulas: paged attention, rotary scaling, tiles of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.execution.batch_inputs import build_batch_inputs
from kvpilot_engine.execution.torch_inputs import build_torch_inputs
from kvpilot_engine.layers.attention import AttentionShape, empty_layer_kv
from kvpilot_engine.layers.linear import ROW_TILE, pad_rows, tiled_linear
from kvpilot_engine.layers.norm import gelu_tanh_and_mul, silu_and_mul, softcap
from kvpilot_engine.layers.torch_attention import TorchAttention


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_paged_attention_equals_plain_attention(head_dim: int, block_size: int) -> None:
    """Three sequences, two of them with tokens from earlier steps, blocks in no order, garbage in unused slots."""
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    generator = torch.Generator().manual_seed(2)
    lengths, computed = (37, 1, 70), (30, 0, 69)
    layer = empty_layer_kv(60, shape, block_size)
    layer.keys[1:].fill_(float("nan"))
    layer.values[1:].fill_(float("nan"))
    free = torch.randperm(59, generator=generator) + 1
    tables, keys, values, taken = [], [], [], 0
    for length in lengths:
        needed = -(-length // block_size)
        tables.append(tuple(BlockId(int(block)) for block in free[taken : taken + needed]))
        taken += needed
        keys.append(torch.randn(length, 2, head_dim, generator=generator))
        values.append(torch.randn(length, 2, head_dim, generator=generator))

    attention = TorchAttention(shape)
    for starts, ends in ((tuple(0 for _ in lengths), computed), (computed, lengths)):
        scheduled = tuple(
            ScheduledSequence(
                RequestId(str(index)),
                starts[index],
                (TokenId(0),) * (ends[index] - starts[index]),
                tables[index],
                SamplingParams(max_tokens=1),
                0,
                samples=True,
            )
            for index in range(3)
            if ends[index] > starts[index]
        )
        chosen = [int(sequence.request_id) for sequence in scheduled]
        plan = attention.plan(build_torch_inputs(build_batch_inputs(SchedulerOutput(scheduled), block_size)).attention)
        attention.write_kv(
            layer,
            torch.cat([keys[i][starts[i] : ends[i]] for i in chosen]),
            torch.cat([values[i][starts[i] : ends[i]] for i in chosen]),
            plan,
        )
    queries = torch.randn(sum(lengths) - sum(computed), 6, head_dim, generator=generator)
    output = attention.forward(queries, layer, plan)

    row = 0
    for index, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        count = length - start
        mask = torch.arange(length)[None, :] <= torch.arange(start, length)[:, None]
        expected = functional.scaled_dot_product_attention(
            queries[row : row + count].transpose(0, 1)[None],
            keys[index].transpose(0, 1)[None],
            values[index].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )[0].transpose(0, 1)
        torch.testing.assert_close(output[row : row + count], expected, rtol=1e-5, atol=1e-5)
        row += count


def test_the_null_block_is_never_written() -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0)
    layer = empty_layer_kv(3, shape, 16)
    sequence = ScheduledSequence(
        RequestId("a"), 0, (TokenId(0),) * 5, (BlockId(2),), SamplingParams(max_tokens=1), 0, samples=True
    )
    attention = TorchAttention(shape)
    plan = attention.plan(build_torch_inputs(build_batch_inputs(SchedulerOutput((sequence,)), 16)).attention)
    attention.write_kv(layer, torch.ones(5, 2, 8), torch.ones(5, 2, 8), plan)
    assert not layer.keys[0].any()
    assert layer.keys[2, :, :5].all()


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 100])
def test_a_linear_row_is_the_same_bits_in_any_company(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(96, 210, generator=generator), torch.randn(210, generator=generator)
    x = torch.randn(rows, 96, generator=generator)
    together = tiled_linear(pad_rows(x), weight, bias)[:rows]
    for row in range(rows):
        assert torch.equal(tiled_linear(pad_rows(x[row : row + 1]), weight, bias)[0], together[row])
    torch.testing.assert_close(together, functional.linear(x, weight.t(), bias), rtol=1e-4, atol=1e-4)


def test_padding_is_rows_of_zeros_up_to_a_whole_tile() -> None:
    padded = pad_rows(torch.ones(ROW_TILE + 1, 3))
    assert padded.shape == (2 * ROW_TILE, 3)
    assert padded.sum() == 3 * (ROW_TILE + 1)


@pytest.mark.parametrize(
    ("gated", "activation"),
    [(silu_and_mul, functional.silu), (gelu_tanh_and_mul, partial(functional.gelu, approximate="tanh"))],
)
def test_gated_activations_are_the_same_bits_at_any_offset(
    gated: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]
) -> None:
    x = 3 * torch.randn(7, 2 * 37, generator=torch.Generator().manual_seed(1))
    gate, up = x.chunk(2, dim=-1)
    together = gated(x)
    torch.testing.assert_close(together, activation(gate) * up)
    for row in range(7):
        assert torch.equal(gated(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("value", [-1e4, 1e4])
def test_gated_activations_stay_finite_far_out(value: float) -> None:
    for gated in (silu_and_mul, gelu_tanh_and_mul):
        out = gated(torch.tensor([[value, 2.0]]))
        assert out.item() == (2 * value if value > 0 else 0.0)


def test_soft_cap_bounds_and_is_the_same_bits_at_any_offset() -> None:
    x = 60 * torch.randn(7, 37, generator=torch.Generator().manual_seed(1))
    together = softcap(x.clone(), 30.0)
    assert together.abs().max() <= 30
    torch.testing.assert_close(together, 30 * torch.tanh(x / 30))
    for row in range(7):
        assert torch.equal(softcap(x[row : row + 1].clone(), 30.0)[0], together[row])
