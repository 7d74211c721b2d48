"""Shares of a device, on a grid of hundredths: a cap then reads well and comparing two means something."""

from __future__ import annotations

import math

EPSILON = 1e-6
"""Shares closer than this are the same."""


def grid_down(share: float) -> float:
    return round(math.floor(share * 100 + EPSILON) / 100, 2)


def grid_up(share: float) -> float:
    return round(math.ceil(share * 100 - EPSILON) / 100, 2)


def is_same_share(one: float, other: float) -> bool:
    return abs(one - other) <= EPSILON
