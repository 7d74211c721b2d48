"""Sums of four products of bytes in each of sixteen int32 lanes: the one place with a path for each kind of machine.

Lane i adds weights[4i..4i+3] * activations[0..3]; activations are within -127..127. Two kinds of weights: small ones
0..127, and biased ones, bytes that stand for byte - 128. All paths give the same integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from llvmlite import ir

from kvpilot_engine.kernels.cpu_features import DotPath
from kvpilot_engine.kernels.simd import I8, I8X64, I16, I32, I32X16, Simd, Value

_HALF_BYTES, _HALF_WORDS, _HALF_LANES = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
_ALL_128 = -0x7F7F7F80
"""Four bytes 0x80 as int32."""


class IntegerDot(ABC):
    """Vectors of bytes are given as sixteen int32 lanes of four bytes.

    Where whole bytes can be multiplied unsigned by signed, biased weights are taken as they are, 128 too large, and
    the sum starts with what that is too much.
    """

    def start_biased(self, simd: Simd, minus_128_sums: Value) -> Value:  # noqa: ARG002 - the other way needs no start
        """What a sum over biased weights starts with; `minus_128_sums`: -128 * the sum of its activations."""
        return minus_128_sums

    def prepare_biased(self, simd: Simd, weights: Value) -> Value:  # noqa: ARG002
        """What can be computed once for many rows of activations."""
        return weights

    def add_biased(self, simd: Simd, total: Value, prepared: Value, activations: Value) -> Value:
        return self.add_small(simd, total, prepared, activations)

    @abstractmethod
    def add_small(self, simd: Simd, total: Value, weights: Value, activations: Value) -> Value: ...


class Avx512Vnni(IntegerDot):
    """One instruction."""

    def add_small(self, simd: Simd, total: Value, weights: Value, activations: Value) -> Value:
        cast = simd.builder.bitcast
        arguments = [total, cast(weights, I8X64), cast(activations, I8X64)]
        return simd.call("llvm.x86.avx512.vpdpbusd.512", I32X16, arguments)


class AvxVnni(IntegerDot):
    """Two instructions, on processors whose widest vectors are 32 bytes."""

    def add_small(self, simd: Simd, total: Value, weights: Value, activations: Value) -> Value:
        cast = simd.builder.bitcast
        sums = [
            simd.call("llvm.x86.avx512.vpdpbusd.256", _HALF_LANES, [part, cast(w, _HALF_BYTES), cast(x, _HALF_BYTES)])
            for part, w, x in zip(*(_halves(simd, vector) for vector in (total, weights, activations)), strict=True)
        ]
        return _join(simd, sums)


class Avx2(IntegerDot):
    """Pairs are added in 16 bits with saturation, which 255 * 127 * 2 would reach: biased weights lend their sign to
    the activations, so that at most 128 * 127 * 2 is added."""

    def start_biased(self, simd: Simd, minus_128_sums: Value) -> Value:  # noqa: ARG002
        return simd.splat_i32(0)

    def prepare_biased(self, simd: Simd, weights: Value) -> Value:
        return simd.builder.xor(weights, simd.splat_i32(_ALL_128))

    def add_biased(self, simd: Simd, total: Value, prepared: Value, activations: Value) -> Value:
        cast = simd.builder.bitcast
        sums = []
        for part, w, x in zip(*(_halves(simd, vector) for vector in (total, prepared, activations)), strict=True):
            weights, values = cast(w, _HALF_BYTES), cast(x, _HALF_BYTES)
            absolute = simd.call("llvm.abs.v32i8", _HALF_BYTES, [weights, ir.Constant(ir.IntType(1), 0)])
            signed = simd.call("llvm.x86.avx2.psign.b", _HALF_BYTES, [values, weights])
            sums.append(self._add_pairs(simd, part, absolute, signed))
        return _join(simd, sums)

    def add_small(self, simd: Simd, total: Value, weights: Value, activations: Value) -> Value:
        cast = simd.builder.bitcast
        sums = [
            self._add_pairs(simd, part, cast(w, _HALF_BYTES), cast(x, _HALF_BYTES))
            for part, w, x in zip(*(_halves(simd, vector) for vector in (total, weights, activations)), strict=True)
        ]
        return _join(simd, sums)

    def _add_pairs(self, simd: Simd, total: Value, unsigned: Value, signed: Value) -> Value:
        pairs = simd.call("llvm.x86.avx2.pmadd.ub.sw", _HALF_WORDS, [unsigned, signed])
        ones = ir.Constant(_HALF_WORDS, [1] * 16)
        return simd.builder.add(total, simd.call("llvm.x86.avx2.pmadd.wd", _HALF_LANES, [pairs, ones]))


class Plain(IntegerDot):
    """Shifts and 32-bit products, for every machine that LLVM knows."""

    def add_small(self, simd: Simd, total: Value, weights: Value, activations: Value) -> Value:
        builder = simd.builder
        for byte in range(4):
            weight = builder.and_(builder.lshr(weights, simd.splat_i32(8 * byte)), simd.splat_i32(255))
            raised = builder.shl(activations, simd.splat_i32(24 - 8 * byte))
            total = builder.add(total, builder.mul(weight, builder.ashr(raised, simd.splat_i32(24))))
        return total


_PATHS: dict[DotPath, IntegerDot] = {
    DotPath.AVX512_VNNI: Avx512Vnni(),
    DotPath.AVX_VNNI: AvxVnni(),
    DotPath.AVX2: Avx2(),
    DotPath.PLAIN: Plain(),
}


def integer_dot(path: DotPath) -> IntegerDot:
    return _PATHS[path]


def _halves(simd: Simd, vector: Value) -> list[Value]:
    undefined = ir.Constant(I32X16, ir.Undefined)
    return [
        simd.builder.shuffle_vector(vector, undefined, ir.Constant(_HALF_LANES, list(range(first, first + 8))))
        for first in (0, 8)
    ]


def _join(simd: Simd, halves: list[Value]) -> Value:
    return simd.builder.shuffle_vector(halves[0], halves[1], ir.Constant(I32X16, list(range(16))))
