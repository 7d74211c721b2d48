"""Packed weights of sixteen outputs turned to bfloat16 tiles, a group of 32 columns at a time.

A weight is rounded once: scale * integer + minimum is computed in float32 and rounded to the nearest bfloat16, ties
away from zero. With four bits there are only sixteen of them for an output and group: computed together and looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from kvpilot_engine.kernels.bfloat_tiles import COLUMNS
from kvpilot_engine.kernels.block_formats import NESTED_COLUMNS, SIMPLE_COLUMNS
from kvpilot_engine.kernels.packed_matrix import OUTPUTS, PackedLayout
from kvpilot_engine.kernels.simd import F32X16, I16X32, I32X16, I64, LANES, LINE, Simd, Value

HALF_OF_LAST_BIT = 0x8000
"""Added to a float32 before its lower half is cut off."""
_NIBBLES_PER_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledBlock:
    """Where one block of sixteen outputs finds everything; a layout in tiles."""

    layout: PackedLayout
    weights: Value
    block_bytes: Value
    bias: Value
    first_output: Value
    mask: Value
    """Of the outputs that exist."""
    num_groups: Value

    @property
    def needs_unpacking(self) -> bool:
        return self.layout.name != "bf16_tiles"

    @property
    def scaling_bytes(self) -> int:
        """Of unpack_scaling's result for a group."""
        return LINE * (self._num_scales + 1)

    @property
    def _num_scales(self) -> int:
        return COLUMNS // self.layout.columns_per_factor

    def fetch_next(self, simd: Simd, group: Value) -> None:
        """Asks for a group's share of the following block, so that memory works while this one is computed."""
        lines = -(-self.layout.group_bytes // LINE)
        start = simd.at(simd.at(self.weights, self.block_bytes), simd.times(group, LINE * lines))
        for line in range(lines):
            simd.prefetch(simd.at(start, LINE * line))

    def unpack_scaling(self, simd: Simd, group: Value, target: Value) -> None:
        """A group's scales, then the minima, of sixteen outputs each, as float32."""
        if self.layout.is_plain:
            return
        for index, vector in enumerate(self._load_scaling(simd, group)):
            simd.store(vector, simd.at(target, LINE * index), LINE)

    def unpack(self, simd: Simd, group: Value, scaling: Value, target: Value) -> None:
        """A tile of weights; `scaling` is what unpack_scaling has left for this group."""
        start = simd.at(self.weights, simd.times(group, self.layout.integers_bytes))
        for first in range(0, OUTPUTS, _NIBBLES_PER_WORD):
            at_four = simd.at(start, first * self.layout.integers_bytes // OUTPUTS)
            nibbles = simd.load(at_four, I16X32, LINE) if self.layout.bits == 4 else None
            for place in range(_NIBBLES_PER_WORD):
                at_row = simd.at(at_four, place * self.layout.integers_bytes // OUTPUTS)
                factors = [
                    simd.at(scaling, LINE * index + 4 * (first + place)) for index in range(self._num_scales + 1)
                ]
                if nibbles is not None:
                    row = _look_up(simd, nibbles, place, *factors)
                elif self.layout.is_plain:
                    row = _narrow(simd, [simd.load_f16(simd.at(at_row, 2 * LANES * half)) for half in range(2)])
                else:
                    row = self._compute(simd, at_row, factors)
                simd.store(row, simd.at(target, LINE * (first + place)), LINE)

    def _compute(self, simd: Simd, at_row: Value, factors: list[Value]) -> Value:
        """32 weights of eight bits."""
        halves = []
        for half in range(2):
            scale = simd.broadcast_f32(factors[half * self._num_scales // 2])
            minimum = simd.broadcast_f32(factors[-1])
            if self._num_scales == 2:
                minimum = simd.mul(scale, simd.splat_f32(-self.layout.zero_point))
            halves.append(simd.fma(simd.load_u8(simd.at(at_row, LANES * half)), scale, minimum))
        return _narrow(simd, halves)

    def _load_scaling(self, simd: Simd, group: Value) -> list[Value]:
        layout = self.layout
        num_scale_planes = 2 if layout.has_minimum else 1
        superblock = group
        if layout.is_nested:
            per_superblock = NESTED_COLUMNS // SIMPLE_COLUMNS
            superblock = simd.builder.lshr(group, ir.Constant(I64, per_superblock.bit_length() - 1))

        def plane(bytes_before: int) -> Value:
            return simd.at(self.weights, simd.times(self.num_groups, bytes_before))

        def halves(index: int) -> Value:
            start = plane(layout.integers_bytes + index * layout.scales_bytes)
            return simd.load_f16(simd.at(start, simd.times(superblock, 2 * OUTPUTS)))

        def factor_place(index: int) -> Value:
            before = layout.integers_bytes + num_scale_planes * layout.scales_bytes + index * layout.factors_bytes
            return simd.at(plane(before), simd.times(group, layout.factors_bytes))

        scale = halves(0)
        if not layout.is_nested:
            minimum = halves(1) if layout.has_minimum else simd.mul(scale, simd.splat_f32(-layout.zero_point))
            return [scale, minimum]
        if not layout.has_minimum:
            factors = [simd.load_s8(simd.at(factor_place(0), OUTPUTS * half)) for half in range(2)]
            return [simd.mul(scale, factor) for factor in factors]
        minima = simd.mul(halves(1), simd.load_u8(factor_place(1)))
        return [simd.mul(scale, simd.load_u8(factor_place(0))), simd.builder.fneg(minima)]


def _look_up(simd: Simd, nibbles: Value, place: int, at_scale: Value, at_minimum: Value) -> Value:
    """32 weights of one output. `nibbles`: words of four outputs' integers, for 32 columns; place: which output.

    The table's sixteen float32 are 32 words, of which the upper ones, the odd ones, are the bfloat16.
    """
    builder = simd.builder
    integers = ir.Constant(F32X16, [float(value) for value in range(16)])
    table = simd.fma(integers, simd.broadcast_f32(at_scale), simd.broadcast_f32(at_minimum))
    table = builder.add(builder.bitcast(table, I32X16), simd.splat_i32(HALF_OF_LAST_BIT))
    shift = 4 * place - 1
    amount = ir.Constant(I16X32, [abs(shift)] * COLUMNS)
    doubled = builder.shl(nibbles, amount) if shift < 0 else builder.lshr(nibbles, amount)
    # the instruction reads the lowest five bits of an index
    index = builder.or_(doubled, ir.Constant(I16X32, [1] * COLUMNS))
    return simd.call("llvm.x86.avx512.permvar.hi.512", I16X32, [builder.bitcast(table, I16X32), index])


def _narrow(simd: Simd, halves: list[Value]) -> Value:
    """Two vectors of float32 as 32 bfloat16."""
    builder = simd.builder
    low, high = (builder.add(builder.bitcast(half, I32X16), simd.splat_i32(HALF_OF_LAST_BIT)) for half in halves)
    return simd.shuffle(builder.bitcast(low, I16X32), builder.bitcast(high, I16X32), range(1, 2 * COLUMNS, 2))
