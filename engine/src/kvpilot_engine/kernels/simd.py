"""A vocabulary for code on sixteen numbers at once, over llvmlite's builder.

For kernels that LLVM does not vectorize as well from a plain loop. A vector is sixteen float32 or int32 lanes; LLVM
turns each operation into one AVX-512, two AVX2 or four NEON instructions, so nothing here names a machine (what does is
in integer_dot.py). Addresses are pointers plus offsets in bytes. Multiplication and addition are never fused or
reordered behind the caller's back: fma() is one rounding, add(mul()) is two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
LINE = 64
"""Bytes of a cache line, and of a vector."""

F16 = ir.HalfType()
F32 = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()

F32X16 = ir.VectorType(F32, LANES)
F16X16 = ir.VectorType(F16, LANES)
I32X16 = ir.VectorType(I32, LANES)
I16X16 = ir.VectorType(I16, LANES)
I8X16 = ir.VectorType(I8, LANES)
I8X64 = ir.VectorType(I8, 4 * LANES)
I16X32 = ir.VectorType(I16, 2 * LANES)

Value = Any
"""A value in the code that is being emitted; llvmlite has no types for mypy."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BF16X16 = ir.VectorType(_BFloat(), LANES)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts, the first so short that n * high is exact."""
_EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Of (exp(r) - 1 - r) / r**2 for |r| <= ln 2 / 2, highest power first: the classic single-precision set."""
_EXP_LOWEST, _EXP_HIGHEST = -87.3, 88.3


class Simd:
    """Emits at the builder's position. `array(...)` and `literal(...)` below help intrinsics to take arguments."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # Addresses

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """The address so many bytes further."""
        index = ir.Constant(I64, offset) if isinstance(offset, int) else offset
        return self.builder.gep(pointer, [index], source_etype=I8)

    def times(self, value: Value, factor: Value | int) -> Value:
        """An integer times an integer: for offsets."""
        return self.builder.mul(value, ir.Constant(value.type, factor) if isinstance(factor, int) else factor)

    def load(self, pointer: Value, kind: Value, alignment: int) -> Value:
        value = self.builder.load(pointer, typ=kind)
        value.align = alignment
        return value

    def store(self, value: Value, pointer: Value, alignment: int) -> None:
        self.builder.store(value, pointer).align = alignment

    def load_f32(self, pointer: Value) -> Value:
        return self.load(pointer, F32X16, 4)

    def load_f16(self, pointer: Value) -> Value:
        """Sixteen half-precision numbers as float32."""
        return self.builder.fpext(self.load(pointer, F16X16, 2), F32X16)

    def load_bf16(self, pointer: Value) -> Value:
        """Sixteen bfloat16 numbers as float32: the upper half of its bits."""
        bits = self.builder.zext(self.load(pointer, I16X16, 2), I32X16)
        return self.builder.bitcast(self.builder.shl(bits, self.splat_i32(16)), F32X16)

    def load_u8(self, pointer: Value) -> Value:
        """Sixteen bytes 0..255 as float32."""
        return self.builder.uitofp(self.load(pointer, I8X16, 1), F32X16)

    def load_s8(self, pointer: Value) -> Value:
        """Sixteen bytes -128..127 as float32."""
        return self.builder.sitofp(self.load(pointer, I8X16, 1), F32X16)

    def store_f32(self, value: Value, pointer: Value) -> None:
        self.store(value, pointer, 4)

    def store_s8(self, value: Value, pointer: Value) -> None:
        """The low byte of int32 lanes."""
        self.store(self.builder.trunc(value, I8X16), pointer, 1)

    def store_first_f32(self, value: Value, pointer: Value, mask: Value) -> None:
        """Only the lanes of the mask; the others' memory is not touched."""
        self._call("llvm.masked.store.v16f32.p0", ir.VoidType(), [value, pointer, ir.Constant(I32, 4), mask])

    def first_lanes(self, count: Value) -> Value:
        """A mask of the first `count` (i64) lanes."""
        lanes = ir.Constant(I32X16, list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.splat(self.builder.trunc(count, I32)))

    def round_to_bf16(self, value: Value) -> Value:
        """Sixteen float32 as the bits of bfloat16 (int16 lanes), rounded to nearest, ties to even."""
        return self.builder.bitcast(self.builder.fptrunc(value, _BF16X16), I16X16)

    def prefetch(self, pointer: Value) -> None:
        """Asks for one cache line to be read soon; any address is allowed."""
        read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
        self._call("llvm.prefetch.p0", ir.VoidType(), [pointer, read, keep, data])

    # Constants and broadcasts

    def splat(self, value: Value) -> Value:
        """A float32 or int32 value in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(I32X16, [0] * LANES))

    def splat_f32(self, value: float) -> Value:
        return ir.Constant(F32X16, [float(value)] * LANES)

    def splat_i32(self, value: int) -> Value:
        return ir.Constant(I32X16, [int(value)] * LANES)

    def broadcast_f32(self, pointer: Value) -> Value:
        """One float32 of memory in all lanes."""
        return self.splat(self.load(pointer, F32, 4))

    def broadcast_i32(self, pointer: Value) -> Value:
        """Four bytes of memory in all lanes."""
        return self.splat(self.load(pointer, I32, 1))

    # Arithmetic

    def add(self, left: Value, right: Value) -> Value:
        return self.builder.fadd(left, right)

    def sub(self, left: Value, right: Value) -> Value:
        return self.builder.fsub(left, right)

    def mul(self, left: Value, right: Value) -> Value:
        return self.builder.fmul(left, right)

    def div(self, left: Value, right: Value) -> Value:
        return self.builder.fdiv(left, right)

    def fma(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend, rounded once."""
        return self._call("llvm.fma.v16f32", F32X16, [left, right, addend])

    def maximum(self, left: Value, right: Value) -> Value:
        """The larger one; the other one where one is NaN."""
        return self._call("llvm.maxnum.v16f32", F32X16, [left, right])

    def minimum(self, left: Value, right: Value) -> Value:
        return self._call("llvm.minnum.v16f32", F32X16, [left, right])

    def round(self, value: Value) -> Value:
        """To the nearest whole number, ties to even."""
        return self._call("llvm.rint.v16f32", F32X16, [value])

    def magnitude_bits(self, value: Value) -> Value:
        """The bits of absolute values. As integers they compare as the numbers do, infinity and NaN highest."""
        return self.builder.and_(self.builder.bitcast(value, I32X16), self.splat_i32(0x7FFFFFFF))

    def maximum_i32(self, left: Value, right: Value) -> Value:
        return self._call("llvm.smax.v16i32", I32X16, [left, right])

    def to_f32(self, integers: Value) -> Value:
        return self.builder.sitofp(integers, F32X16)

    def to_i32(self, value: Value) -> Value:
        """Whole numbers within int32 as int32; others give an arbitrary value."""
        return self.builder.fptosi(value, I32X16)

    def exp(self, value: Value) -> Value:
        """exp within two units in the last place; saturates outside of -87.3..88.3. Not for NaN."""
        value = self.minimum(self.maximum(value, self.splat_f32(_EXP_LOWEST)), self.splat_f32(_EXP_HIGHEST))
        power = self.round(self.mul(value, self.splat_f32(_LOG2_E)))
        rest = self.fma(power, self.splat_f32(-_LN2_HIGH), value)
        rest = self.fma(power, self.splat_f32(-_LN2_LOW), rest)
        series = self.splat_f32(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            series = self.fma(series, rest, self.splat_f32(coefficient))
        result = self.add(self.fma(self.mul(rest, rest), series, rest), self.splat_f32(1.0))
        exponent = self.builder.shl(self.builder.add(self.to_i32(power), self.splat_i32(127)), self.splat_i32(23))
        return self.mul(result, self.builder.bitcast(exponent, F32X16))

    # Across lanes

    def shuffle(self, left: Value, right: Value, lanes: Sequence[int]) -> Value:
        """Chosen lanes of two vectors, those of the second counted on."""
        return self.builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Sixteen vectors of sixteen 32-bit lanes: lane i of vector j to lane j of vector i."""
        vectors = list(rows)
        for distance in (8, 4, 2, 1):
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            for index in (index for index in range(LANES) if not index & distance):
                pair = vectors[index], vectors[index + distance]
                vectors[index], vectors[index + distance] = self.shuffle(*pair, low), self.shuffle(*pair, high)
        return vectors

    def sum(self, value: Value) -> Value:
        """All lanes added, in halves: always the same order."""
        return self._reduce(value, self.add)

    def max(self, value: Value) -> Value:
        return self._reduce(value, self.maximum)

    def max_i32(self, value: Value) -> Value:
        return self._reduce(value, self.maximum_i32)

    def sum_i32(self, value: Value) -> Value:
        return self._reduce(value, self.builder.add)

    def _reduce(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        for distance in (8, 4, 2, 1):
            rotated = ir.Constant(I32X16, [(lane + distance) % LANES for lane in range(LANES)])
            value = combine(value, self.builder.shuffle_vector(value, value, rotated))
        return self.builder.extract_element(value, ir.Constant(I32, 0))

    # Control

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """Emits the body once, to run with the index 0, 1, … count - 1 (i64)."""
        with cgutils.for_range(self.builder, count, intp=I64) as state:
            yield state.index

    def variable(self, initial: Value) -> Value:
        """A place that keeps a value over the turns of a loop: read it with get, change it with put."""
        place = cgutils.alloca_once(self.builder, initial.type)  # type: ignore[no-untyped-call]
        self.builder.store(initial, place)
        return place

    def allocate_lines(self, count: int) -> Value:
        """Memory of the emitted function: so many lines of 64 bytes, at the start of a cache line."""
        place = cgutils.alloca_once(self.builder, ir.ArrayType(I32X16, count))  # type: ignore[no-untyped-call]
        place.align = LINE
        return self.builder.inttoptr(self.builder.ptrtoint(place, I64), POINTER)

    @contextmanager
    def memory(self, num_lines: Value) -> Iterator[Value]:
        """The same for a number that is known when it runs, for the time of the context: on the thread's stack."""
        top = self.call("llvm.stacksave.p0", POINTER, [])
        place = self.builder.alloca(I32X16, size=num_lines)
        place.align = LINE
        yield self.builder.inttoptr(self.builder.ptrtoint(place, I64), POINTER)
        self.call("llvm.stackrestore.p0", ir.VoidType(), [top])

    def smaller(self, left: Value, right: Value | int) -> Value:
        """The smaller of two signed integers."""
        other = ir.Constant(left.type, right) if isinstance(right, int) else right
        return self.builder.select(self.builder.icmp_signed("<", left, other), left, other)

    def get(self, place: Value, kind: Value = F32X16) -> Value:
        return self.builder.load(place, typ=kind)

    def put(self, place: Value, value: Value) -> None:
        self.builder.store(value, place)

    # Instructions of a machine

    def call(self, name: str, result: Value, arguments: Sequence[Value]) -> Value:
        """Calls an LLVM intrinsic by its name."""
        return self._call(name, result, arguments)

    def _call(self, name: str, result: Value, arguments: Sequence[Value]) -> Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(module, signature, name)
        return self.builder.call(function, list(arguments))


class EmittedArray:
    """An array argument of an intrinsic: its address, lengths and strides in bytes as emitted values."""

    def __init__(self, context: Any, builder: ir.IRBuilder, array_type: Any, value: Value) -> None:
        array = context.make_array(array_type)(context, builder, value)
        # numba's pointer has a type, and llvmlite would refuse to store anything else there.
        self.pointer = builder.inttoptr(builder.ptrtoint(array.data, I64), POINTER)
        self.shape = cgutils.unpack_tuple(builder, array.shape)  # type: ignore[no-untyped-call]
        self.strides = cgutils.unpack_tuple(builder, array.strides)  # type: ignore[no-untyped-call]
