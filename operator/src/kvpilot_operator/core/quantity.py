"""Kubernetes quantities (`2Gi`, `500m`, `1e3`) as exact numbers. Only to compare and to halve; nothing is stored so."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES = {
    **{suffix: Fraction(1024) ** power for power, suffix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{
        suffix: Fraction(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
}
_PATTERN = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE])?)")


def parse_quantity(value: object) -> Fraction | None:
    """The number, exactly; None for what is not a quantity."""
    match = _PATTERN.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        return None
    number, exponent, suffix = match.groups()
    return Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])
