"""Quantities as exact numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvpilot_operator.core.quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (2, 2),
        ("2", 2),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", 3 * 512 * 1024**2),
        ("2k", 2000),
        ("1Ei", 1024**6),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("5u", Fraction(5, 10**6)),
    ],
)
def test_quantity_is_exact(text: object, number: Fraction | int) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "2 Gi", "2GB", "Gi", "1e", True, None, "1e9999", "nan"])
def test_what_is_no_quantity_is_none(text: object) -> None:
    assert parse_quantity(text) is None
