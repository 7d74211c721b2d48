"""Compiles what sampling and log-probabilities need, or loads it from the cache.

For a thread that runs while weights are read: it runs no kernel, it only makes them. The signatures are those of the
calls, so that nothing compiles later.
"""

from __future__ import annotations

from typing import Any

from numba import types

from kvpilot_engine.kernels import counter_random, logit_edits, sampling, token_rating

_LOGITS = types.Array(types.float32, 2, "C")
_ROW = types.Array(types.float32, 1, "C")
_FLOATS = types.Array(types.float64, 1, "C")
_FLOAT_ROWS = types.Array(types.float64, 2, "C")
_LONGS = types.Array(types.int64, 1, "C")
_LONG_ROWS = types.Array(types.int64, 2, "C")
_COUNTS = types.Array(types.int32, 1, "C")
_HISTORY = types.Array(types.int32, 1, "C", readonly=True)
_MASK = types.Array(types.uint32, 1, "C")

CHOICE = (_LOGITS, _LONGS, _FLOATS, _LONGS, _FLOATS, _FLOATS, _FLOATS, _LONGS)
RATING = (_LOGITS, _LONGS, _LONGS, _LONGS, _FLOATS, _LONGS, _LONG_ROWS, _FLOAT_ROWS)

_KEYS = types.Array(types.uint64, 1, "C")

SIGNATURES: list[tuple[Any, tuple[Any, ...]]] = [
    (counter_random.fill_uniforms, (_KEYS, _KEYS, _KEYS, _FLOATS)),
    (sampling.choose_share, (*CHOICE, types.int64, types.int64)),
    (sampling.choose_in_parallel, (*CHOICE, types.int64)),
    (token_rating.rate_share, (*RATING, types.int64, types.int64)),
    (token_rating.rate_in_parallel, (*RATING, types.int64)),
    (logit_edits.copy_allowed, (_ROW, _MASK, _ROW)),
    (logit_edits.penalize, (_ROW, _HISTORY, types.int64, types.float64, types.float64, types.float64, _COUNTS)),
]


def compile_sampling() -> None:
    """All of them; about ten seconds of one core when the cache holds none, a tenth of a second when it does."""
    for kernel, signature in SIGNATURES:
        kernel.compile(signature)
