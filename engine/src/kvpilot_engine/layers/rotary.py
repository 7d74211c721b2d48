"""Rotary position embedding, half rotation (Hugging Face's layout: first half of the head with the second).

Tables come from models/rotary_tables.py, which knows the kinds of scaling.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryEmbedding:
    """Looks up the cosines and sines [positions, rotary_dim / 2] of a step."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos = cos
        self._sin = sin

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, 1, rotary_dim / 2] of a step, looked up once for all layers."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim]: of each head as many elements as there are angles for, from the front."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
