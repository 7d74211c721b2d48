"""Sixteen rows at once by AMX: integer sums of a group of 32 columns, the same integers as integer_dot.py gives.

A tile multiply takes the bytes of sixteen rows and eight vectors of weights from memory and leaves sixteen vectors of
sums in memory. The shapes of the registers are told to the processor before (`configure`), and afterwards it is told to
forget them (`release`), so that a thread's other work does not carry them along.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from kvpilot_engine.kernels.simd import I8, I8X64, I32X16, I64, POINTER, Simd, Value

ROWS = 16
"""Of a tile of activations."""
QUADS = 8
"""Vectors of weights of a group."""
VECTOR_BYTES = 64

_SUMS, _ROWS, _WEIGHTS = range(3)
"""Registers."""
_GROUP_BYTES = 4 * QUADS
"""Of a row."""
_PALETTE, _FIRST_WIDTH, _FIRST_HEIGHT = 0, 16, 48
"""Places in the configuration: the palette's number, two bytes of width for each register, one byte of height."""


def configure(simd: Simd) -> None:
    """Shapes for multiply_group."""
    content = [0] * VECTOR_BYTES
    content[_PALETTE] = 1
    shapes = {_SUMS: (VECTOR_BYTES, ROWS), _ROWS: (_GROUP_BYTES, ROWS), _WEIGHTS: (VECTOR_BYTES, QUADS)}
    for register, (width, height) in shapes.items():
        content[_FIRST_WIDTH + 2 * register] = width
        content[_FIRST_HEIGHT + register] = height
    place = allocate_vectors(simd, 1)
    simd.store(ir.Constant(I8X64, content), place, VECTOR_BYTES)
    simd.call("llvm.x86.ldtilecfg", ir.VoidType(), [place])


def release(simd: Simd) -> None:
    simd.call("llvm.x86.tilerelease", ir.VoidType(), [])


def multiply_group(simd: Simd, rows: Value, row_bytes: Value, weights: Value, sums: Value) -> None:
    """sums[row] = the row's 32 signed bytes times the unsigned ones of the weights, vector by vector."""
    between_vectors = ir.Constant(I64, VECTOR_BYTES)
    in_sums, in_rows, in_weights = (ir.Constant(I8, register) for register in (_SUMS, _ROWS, _WEIGHTS))
    nothing = ir.VoidType()
    simd.call("llvm.x86.tilezero", nothing, [in_sums])
    simd.call("llvm.x86.tileloadd64", nothing, [in_rows, rows, row_bytes])
    simd.call("llvm.x86.tileloadd64", nothing, [in_weights, weights, between_vectors])
    simd.call("llvm.x86.tdpbsud", nothing, [in_sums, in_rows, in_weights])
    simd.call("llvm.x86.tilestored64", nothing, [in_sums, sums, between_vectors])


def allocate_vectors(simd: Simd, count: int) -> Value:
    """Memory of the emitted function for so many vectors, at the start of a cache line."""
    place = cgutils.alloca_once(simd.builder, ir.ArrayType(I32X16, count))  # type: ignore[no-untyped-call]
    place.align = VECTOR_BYTES
    return simd.builder.inttoptr(simd.builder.ptrtoint(place, I64), POINTER)
