"""AMX's tile registers for bfloat16: products of sixteen outputs with up to sixteen rows, 32 columns at a time.

    weights     [16 outputs, 32 columns] bfloat16, a line of 64 bytes for each output
    rows        [16 pairs of columns, width rows, 2] bfloat16
    sums        [16 outputs, width rows] float32

A sum takes the columns in ascending order and no note of the other rows. The processor is told the shapes before
(`configure`) and told to forget them afterwards (`release`), so that a thread's other work does not carry them along. A
tile must not be loaded from stores that are still on their way: that waits for all of them.
"""

from __future__ import annotations

from llvmlite import ir

from kvpilot_engine.kernels.simd import I8, I8X64, I64, LINE, Simd, Value

ROWS = 16
"""Most rows of a tile, and its outputs."""
COLUMNS = 32
WEIGHT_TILE_BYTES = 1024
ROW_BYTES = 2 * COLUMNS
"""Of a row of activations in a tile."""

_SUMS, _WEIGHTS, _INPUTS, _REGISTERS = 0, 4, 6, 8
"""First registers: of four sums, two tiles of weights and two of rows."""
_PALETTE, _FIRST_WIDTH, _FIRST_HEIGHT = 0, 16, 48
"""Places in the configuration: the palette's number, two bytes of width for each register, one byte of height."""


class BFloatTiles:
    """Emits tile instructions at the builder's position."""

    def __init__(self, simd: Simd, width: Value) -> None:
        """`width`: rows of a tile, i64."""
        self._simd = simd
        self._line = ir.Constant(I64, LINE)
        self._pair_bytes = simd.times(width, 4)
        self._scratch = simd.allocate_lines(2 * ROWS)

    def configure(self) -> None:
        simd = self._simd
        content = [0] * LINE
        content[_PALETTE] = 1
        for register in range(_REGISTERS):
            content[_FIRST_WIDTH + 2 * register] = LINE
            content[_FIRST_HEIGHT + register] = ROWS
        place = simd.allocate_lines(1)
        simd.store(ir.Constant(I8X64, content), place, LINE)
        width = simd.builder.trunc(self._pair_bytes, I8)
        for register in (*range(_SUMS, _WEIGHTS), *range(_INPUTS, _REGISTERS)):
            simd.store(width, simd.at(place, _FIRST_WIDTH + 2 * register), 1)
        self._emit("ldtilecfg", place)

    def release(self) -> None:
        self._emit("tilerelease")

    def clear(self, sums: int) -> None:
        for number in range(sums):
            self._emit("tilezero", _register(_SUMS + number))

    def multiply(self, weights: list[Value], inputs: list[Value], first_sum: int = 0) -> None:
        """sum[first_sum + w * len(inputs) + i] += weights[w] @ inputs[i]; both lists hold addresses of tiles."""
        for number, place in enumerate(weights):
            self._emit("tileloadd64", _register(_WEIGHTS + number), place, self._line)
        for number, place in enumerate(inputs):
            self._emit("tileloadd64", _register(_INPUTS + number), place, self._pair_bytes)
        for weight in range(len(weights)):
            for row in range(len(inputs)):
                total = _register(_SUMS + first_sum + weight * len(inputs) + row)
                self._emit("tdpbf16ps", total, _register(_WEIGHTS + weight), _register(_INPUTS + row))

    def store_sums(self, numbers: list[int]) -> list[Value]:
        """Addresses of one or two sums: a line for each output; lane r is row r, lanes beyond the width are arbitrary.

        Good until the next call.
        """
        places = [self._simd.at(self._scratch, LINE * ROWS * index) for index in range(len(numbers))]
        for number, place in zip(numbers, places, strict=True):
            self._emit("tilestored64", _register(_SUMS + number), place, self._line)
        return places

    def _emit(self, name: str, *arguments: Value) -> None:
        self._simd.call(f"llvm.x86.{name}", ir.VoidType(), list(arguments))


def _register(number: int) -> Value:
    return ir.Constant(I8, number)
