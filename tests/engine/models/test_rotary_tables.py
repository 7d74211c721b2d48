"""Rotary tables of each kind of scaling."""

from __future__ import annotations

import math

import numpy as np

from kvpilot_engine.models.decoder_config import (
    FrequencyRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
)
from kvpilot_engine.models.rotary_tables import rotary_frequencies, rotary_tables


def rope(scaling: RopeScaling | None = None, *, theta: float = 10000.0, dim: int = 8) -> RopeConfig:
    return RopeConfig(theta=theta, rotary_dim=dim, scaling=scaling)


def test_plain_tables_are_cosines_and_sines_of_positions() -> None:
    cos, sin = rotary_tables(rope(), 50)
    assert cos.shape == sin.shape == (50, 4)
    assert cos.dtype == sin.dtype == np.float32
    for pair in range(4):
        angle = 37 * 10000.0 ** (-2 * pair / 8)
        assert math.isclose(cos[37, pair], math.cos(angle), abs_tol=1e-5)
        assert math.isclose(sin[37, pair], math.sin(angle), abs_tol=1e-5)


def test_llama3_scaling_keeps_high_divides_low_and_blends_between() -> None:
    scaling = Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    plain = rotary_frequencies(rope(theta=500_000.0, dim=128), 1)
    scaled = rotary_frequencies(rope(scaling, theta=500_000.0, dim=128), 1)
    wavelength = 2 * math.pi / plain
    high, low = wavelength < 8192 / 4, wavelength > 8192
    assert (scaled[high] == plain[high]).all()
    np.testing.assert_allclose(scaled[low], plain[low] / 8, rtol=1e-6)
    between = ~(high | low)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_linear_scaling_and_factors_divide_frequencies() -> None:
    plain = rotary_frequencies(rope(), 1)
    np.testing.assert_allclose(rotary_frequencies(rope(LinearRopeScaling(factor=4.0)), 1), plain / 4, rtol=1e-6)
    factors = (1.0, 2.0, 4.0, 8.0)
    np.testing.assert_allclose(
        rotary_frequencies(rope(FrequencyRopeScaling(factors=factors)), 1), plain / np.array(factors), rtol=1e-6
    )


def test_long_factors_are_chosen_by_the_length_served_and_tables_are_multiplied() -> None:
    scaling = LongRopeScaling(
        short_factors=(1.0,) * 4,
        long_factors=(2.0,) * 4,
        original_max_position_embeddings=64,
        attention_factor=1.25,
    )
    plain = rotary_frequencies(rope(), 1)
    assert (rotary_frequencies(rope(scaling), 64) == plain).all()
    assert (rotary_frequencies(rope(scaling), 65) == plain / 2).all()
    cos, sin = rotary_tables(rope(scaling), 65)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-5)
