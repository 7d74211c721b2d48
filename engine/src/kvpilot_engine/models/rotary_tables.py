"""Cosines and sines of the rotary embedding, for every kind of scaling. Numpy only: the reference and the compiled path
take the same tables.

Angles are float32 products of float32 frequencies, as models were trained with; the functions of them are exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvpilot_engine.models.decoder_config import (
    FrequencyRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
)

FloatArray = npt.NDArray[np.float32]


def rotary_frequencies(rope: RopeConfig, max_positions: int) -> FloatArray:
    """[rotary_dim / 2] radians per position; max_positions is the length that is served."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    match rope.scaling:
        case LinearRopeScaling(factor=factor):
            frequencies /= factor
        case FrequencyRopeScaling(factors=factors):
            frequencies /= np.array(factors)
        case LongRopeScaling() as scaling:
            is_long = max_positions > scaling.original_max_position_embeddings
            frequencies /= np.array(scaling.long_factors if is_long else scaling.short_factors)
        case Llama3RopeScaling() as scaling:
            frequencies = _scale_llama3(frequencies, scaling)
    return frequencies.astype(np.float32)


def rotary_tables(rope: RopeConfig, max_positions: int) -> tuple[FloatArray, FloatArray]:
    """(cosines, sines), each [max_positions, rotary_dim / 2]."""
    positions = np.arange(max_positions, dtype=np.float32)
    angles = np.outer(positions, rotary_frequencies(rope, max_positions))
    cos, sin = np.cos(angles), np.sin(angles)
    if isinstance(rope.scaling, LongRopeScaling):
        cos *= np.float32(rope.scaling.attention_factor)
        sin *= np.float32(rope.scaling.attention_factor)
    return cos, sin


def _scale_llama3(frequencies: npt.NDArray[np.float64], scaling: Llama3RopeScaling) -> npt.NDArray[np.float64]:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smoothed = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    is_low = wavelength > original / scaling.low_freq_factor
    is_high = wavelength < original / scaling.high_freq_factor
    return np.where(is_high, frequencies, np.where(is_low, frequencies / scaling.factor, smoothed))
