"""RMS normalization, gated activations and the soft cap, with results that depend on the row alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] divided by the root mean square of its last dimension, times weight."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of [rows, 2 * width].

    Not functional.silu: its vector body and its scalar tail differ in the last bit, so that a value would depend on
    where in the batch it lies. exp, division and product give the same bits in both.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate / torch.exp(-gate).add_(1.0)).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """The tanh form of gelu(first half) * second half of [rows, 2 * width].

    0.5 * (1 + tanh(z)) is 1 / (1 + exp(-2 * z)): the same operations as above, for the same reason.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    exponent = gate * gate * gate * 0.044715 + gate
    return (gate / torch.exp(exponent.mul_(-2.0 * math.sqrt(2.0 / math.pi))).add_(1.0)).mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)
