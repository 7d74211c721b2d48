"""Numbers as their bits, for plain loops: what numba can't say about half precision and about the bits of a float32.

LLVM vectorizes loops over these. For code on vectors see simd.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.jit import emitted
from kvpilot_engine.kernels.simd import F16, F32, I16


@emitted
def half_to_float(typing_context: Any, half: Any) -> tuple[Any, Callable[..., Any]]:  # noqa: ARG001 - numba's protocol
    """The float32 of half-precision bits (uint16)."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.fpext(builder.bitcast(arguments[0], F16), F32)

    return types.float32(types.uint16), emit


@emitted
def float_to_half(typing_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:  # noqa: ARG001
    """Half-precision bits (uint16) of a float32; to nearest, ties to even."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(builder.fptrunc(arguments[0], F16), I16)

    return types.uint16(types.float32), emit


@emitted
def bits_to_float(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:  # noqa: ARG001
    """The float32 of its bits (int32)."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.int32), emit
