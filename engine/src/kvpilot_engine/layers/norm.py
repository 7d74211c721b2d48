"""RMS normalization and the gated activation, with results that depend on the row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, hidden] divided by its root mean square, times weight."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of [rows, 2 * width].

    Not functional.silu: its vector body and its scalar tail differ in the last bit, so that a value would depend on
    where in the batch it lies. exp, division and product give the same bits in both.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate / torch.exp(-gate).add_(1.0)).mul_(up)
