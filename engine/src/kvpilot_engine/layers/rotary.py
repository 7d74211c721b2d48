"""Rotary position embedding, half rotation (Hugging Face's layout: first half of the head with the second)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3's long-context scaling: low frequencies are divided, middle ones blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rotary_frequencies(head_dim: int, theta: float, scaling: Llama3RopeScaling | None = None) -> Tensor:
    """[head_dim / 2] float32 radians per position."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return inverse
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smoothed = (1 - blend) * inverse / scaling.factor + blend * inverse
    is_low = wavelength > original / scaling.low_freq_factor
    is_high = wavelength < original / scaling.high_freq_factor
    return torch.where(is_high, inverse, torch.where(is_low, inverse / scaling.factor, smoothed))


class RotaryEmbedding:
    """Cosine and sine tables of all positions below max_positions; rotates queries and keys."""

    def __init__(self, frequencies: Tensor, max_positions: int) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._cos = angles.cos()
        self._sin = angles.sin()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, 1, head_dim / 2] of a step, looked up once for all layers."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
