"""Whether a start has compiled anything."""

from __future__ import annotations

from numba import njit

from kvpilot_engine.execution.compile_count import count_compiled


def test_what_is_there_already_does_not_count() -> None:
    kernel = njit("int64(int64)")
    with count_compiled() as first:
        compiled = kernel(lambda number: number + 1)
    with count_compiled() as second:
        assert compiled(1) == 2
    assert first.describe("/folder") == "kernels: 1 compiled, kept in /folder"
    assert second.describe("/folder") == "kernels: none compiled, all loaded from /folder"
