"""The innermost steps of paged attention on AMX: products of bfloat16 tiles, read where they lie in the cache.

Not for which keys belong to whom (tiled_attention) nor for machines without AMX (attention_tiles). A tile multiply
takes 32 elements of up to sixteen rows on the left and as many of sixteen columns on the right, in pairs of neighbours;
keys and values are kept so that a run of sixteen tokens is made of right tiles:

    keys of a run        [head_dim / 2, 16 tokens, 2]         columns are tokens
    values of a run      [head_dim / 16, 8, 16, 2]            columns are elements, pairs are tokens 2 p and 2 p + 1
    queries of a tile    [head_dim / 32, 16 rows, 32]
    scores of a tile     [16 rows, GROUP] float32
    weights of a tile    [16 rows, GROUP] bfloat16
    sums of a tile       [16 rows, head_dim] float32

Products are of rounded numbers, sums and softmax float32. Invariant: a row's bits depend neither on the rows beside it
nor on how many keys are computed at once. Numbers come and go by address, at the start of a cache line.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.attention_tiles import (
    CHUNK,
    MASKED,
    Emission,
    cap_scores,
    emit_in_steps,
    num_vectors,
    to_pointer,
)
from kvpilot_engine.kernels.jit import emitted
from kvpilot_engine.kernels.simd import F32, F32X16, I8, I8X64, I16, I32, I32X16, I64, LANES, LINE, Simd, Value

ROWS = 16
"""Of a tile."""
STEP = 2 * LANES
"""Elements of a row that one multiply takes."""
TILE_BYTES = 1024
GROUP = 64
"""Keys whose softmax is taken at once: they and their values stay in the nearest cache for all tiles of rows."""
STEPS_OF_GROUP = GROUP // STEP
WEIGHT_ROW_BYTES = 2 * GROUP

_SUMS = (0, 1, 2, 3)
_LEFT, _RIGHT = 4, 5
"""Registers of 32 elements."""
_HALF_LEFT, _HALF_RIGHT = 6, 7
"""Of 16 elements: a head's last ones where 32 do not divide it, and the sixteen tokens of a run."""
_PALETTE, _FIRST_WIDTH, _FIRST_HEIGHT = 0, 16, 48
_HALF_TILE_BYTES = TILE_BYTES // 2

_ROUNDING = 12582912.0
"""1.5 * 2**23: added to a small number it leaves the nearest whole one in the low bits."""
_LOWEST_POWER = -126.0
_POWER_OF_TWO = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)
"""2**r for |r| <= 1/2 within 1.1e-7, highest power first; exact for 0."""


def _register(number: int) -> Value:
    return ir.Constant(I8, number)


def _tile(simd: Simd, name: str, *arguments: Value) -> None:
    simd.call(f"llvm.x86.{name}", ir.VoidType(), list(arguments))


@emitted
def begin_tiles(typing_context: Any, num_rows: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """Tells this thread's processor the shapes: left tiles and sums have so many rows (at most 16)."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        content = [0] * LINE
        content[_PALETTE] = 1
        for register in (*_SUMS, _LEFT, _RIGHT, _HALF_LEFT, _HALF_RIGHT):
            content[_FIRST_WIDTH + 2 * register] = LINE // 2 if register == _HALF_LEFT else LINE
            content[_FIRST_HEIGHT + register] = ROWS // 2 if register == _HALF_RIGHT else ROWS
        place = simd.allocate_lines(1)
        simd.store(ir.Constant(I8X64, content), place, LINE)
        for register in (*_SUMS, _LEFT, _HALF_LEFT):
            simd.store(builder.trunc(arguments[0], I8), simd.at(place, _FIRST_HEIGHT + register), 1)
        _tile(simd, "ldtilecfg", place)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@emitted
def end_tiles(typing_context: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """Forgets the shapes, so that the thread's other work does not carry the registers along."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        _tile(Simd(builder), "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


@emitted
def round_row(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    source: Any,  # noqa: ARG001
    factor: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    place: Any,  # noqa: ARG001
) -> Emission:
    """A query [head_dim] float32 times a factor, as a row of a tile; `place`: of its first element."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, target = to_pointer(simd, arguments[0]), to_pointer(simd, arguments[3])
        factors = simd.splat(arguments[1])
        with simd.loop(num_vectors(simd, arguments[2])) as vector:
            value = simd.mul(simd.load_f32(simd.at(row, simd.times(vector, LANES * 4))), factors)
            step, half = builder.lshr(vector, ir.Constant(I64, 1)), builder.and_(vector, ir.Constant(I64, 1))
            offset = builder.add(simd.times(step, TILE_BYTES), simd.times(half, LANES * 2))
            simd.store(simd.round_to_bf16(value), simd.at(target, offset), LANES * 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), emit


@emitted
def score_tile_on_runs(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    queries: Any,  # noqa: ARG001
    runs: Any,  # noqa: ARG001
    num_runs: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    scores: Any,  # noqa: ARG001
) -> Emission:
    """scores[r, 16 * run ...] = queries[r] . keys, for the runs of a table of addresses."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        left, table, out = (to_pointer(simd, arguments[index]) for index in (0, 1, 4))
        num_runs, head_dim = arguments[2:4]
        line = ir.Constant(I64, LINE)
        num_steps = builder.udiv(head_dim, ir.Constant(I64, STEP))
        has_rest = builder.icmp_unsigned("!=", builder.urem(head_dim, ir.Constant(I64, STEP)), ir.Constant(I64, 0))

        def emit_runs(first: Value, count: int) -> None:
            entries = simd.at(table, simd.times(first, 8))
            keys = [to_pointer(simd, simd.load(simd.at(entries, 8 * run), I64, 8)) for run in range(count)]

            def multiply(step: Value, left_register: int, right_register: int) -> None:
                offset = simd.times(step, TILE_BYTES)
                _tile(simd, "tileloadd64", _register(left_register), simd.at(left, offset), line)
                for run in range(count):
                    _tile(simd, "tileloadd64", _register(right_register), simd.at(keys[run], offset), line)
                    operands = (_SUMS[run], left_register, right_register)
                    _tile(simd, "tdpbf16ps", *(_register(number) for number in operands))

            for run in range(count):
                _tile(simd, "tilezero", _register(_SUMS[run]))
            with simd.loop(num_steps) as step:
                multiply(step, _LEFT, _RIGHT)
            with builder.if_then(has_rest):
                multiply(num_steps, _HALF_LEFT, _HALF_RIGHT)
            start = simd.at(out, simd.times(first, CHUNK * 4))
            for run in range(count):
                place = simd.at(start, run * CHUNK * 4)
                _tile(simd, "tilestored64", _register(_SUMS[run]), place, ir.Constant(I64, GROUP * 4))

        emit_in_steps(simd, num_runs, len(_SUMS), emit_runs)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@emitted
def weigh_tile_on_runs(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    weights: Any,  # noqa: ARG001
    runs: Any,  # noqa: ARG001
    num_runs: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    sums: Any,  # noqa: ARG001
) -> Emission:
    """sums[r] += the sum of weights[r, key] * values[key], for the runs of a table of addresses in rising order."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        left, table, out = (to_pointer(simd, arguments[index]) for index in (0, 1, 4))
        num_runs, head_dim = arguments[2:4]
        row_bytes = simd.times(head_dim, 4)

        def emit_columns(first: Value, count: int) -> None:
            start = simd.at(out, simd.times(first, LANES * 4))
            places = [simd.at(start, column * LANES * 4) for column in range(count)]
            for column, place in enumerate(places):
                _tile(simd, "tileloadd64", _register(_SUMS[column]), place, row_bytes)
            with simd.loop(num_runs) as run:
                values = to_pointer(simd, simd.load(simd.at(table, simd.times(run, 8)), I64, 8))
                values = simd.at(values, simd.times(first, _HALF_TILE_BYTES))
                its_weights = simd.at(left, simd.times(run, CHUNK * 2))
                between_rows = ir.Constant(I64, WEIGHT_ROW_BYTES)
                _tile(simd, "tileloadd64", _register(_HALF_LEFT), its_weights, between_rows)
                for column in range(count):
                    place = simd.at(values, column * _HALF_TILE_BYTES)
                    _tile(simd, "tileloadd64", _register(_HALF_RIGHT), place, ir.Constant(I64, LINE))
                    operands = (_SUMS[column], _HALF_LEFT, _HALF_RIGHT)
                    _tile(simd, "tdpbf16ps", *(_register(number) for number in operands))
            for column, place in enumerate(places):
                _tile(simd, "tilestored64", _register(_SUMS[column]), place, row_bytes)

        emit_in_steps(simd, num_vectors(simd, head_dim), len(_SUMS), emit_columns)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@emitted
def copy_values(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    source: Any,  # noqa: ARG001
    count: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    place: Any,  # noqa: ARG001
) -> Emission:
    """The first `count` tokens of a run's values, and zeros: what lies behind a sequence's end may be anything."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        values, target = to_pointer(simd, arguments[0]), to_pointer(simd, arguments[3])
        with simd.loop(ir.Constant(I64, LANES // 2)) as pair:
            left = builder.sub(arguments[1], simd.times(pair, 2))
            both = builder.icmp_signed(">=", left, ir.Constant(I64, 2))
            one = builder.icmp_signed("==", left, ir.Constant(I64, 1))
            mask = builder.select(
                both, ir.Constant(I32, -1), builder.select(one, ir.Constant(I32, 0xFFFF), ir.Constant(I32, 0))
            )
            with simd.loop(num_vectors(simd, arguments[2])) as column:
                offset = builder.add(simd.times(column, _HALF_TILE_BYTES), simd.times(pair, LINE))
                kept = builder.and_(simd.load(simd.at(values, offset), I32X16, LINE), simd.splat(mask))
                simd.store(kept, simd.at(target, offset), LINE)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def _larger(simd: Simd, left: Value, right: Value) -> Value:
    """One instruction, unlike Simd.maximum; `right` where one is NaN."""
    return simd.builder.select(simd.builder.fcmp_ordered(">", left, right), left, right)


def _power_of_two(simd: Simd, value: Value) -> Value:
    """2**value for values up to 0, down to 2**-126."""
    builder = simd.builder
    value = _larger(simd, value, simd.splat_f32(_LOWEST_POWER))
    shifted = simd.add(value, simd.splat_f32(_ROUNDING))
    rest = simd.sub(value, simd.sub(shifted, simd.splat_f32(_ROUNDING)))
    series = simd.splat_f32(_POWER_OF_TWO[0])
    for coefficient in _POWER_OF_TWO[1:]:
        series = simd.fma(series, rest, simd.splat_f32(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, I32X16), simd.splat_i32(23))
    return builder.bitcast(builder.add(builder.bitcast(series, I32X16), exponent), F32X16)


def _store_weights(simd: Simd, halves: list[Value], place: Value) -> None:
    """Thirty-two weights."""
    rounded = [simd.round_to_bf16(half) for half in halves]
    simd.store(simd.shuffle(rounded[0], rounded[1], range(STEP)), place, LINE)


@emitted
def soften_row(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    scores: Any,  # noqa: ARG001
    weights: Any,  # noqa: ARG001
    first_step: Any,  # noqa: ARG001
    end_step: Any,  # noqa: ARG001
    first_key: Any,  # noqa: ARG001
    end_key: Any,  # noqa: ARG001
    softcap: Any,  # noqa: ARG001
    sums: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    totals: Any,  # noqa: ARG001
    highest: Any,  # noqa: ARG001
) -> Emission:
    """A group's scores of a row become weights 2**(score - highest), rounded; 0 outside of the keys given.

    `highest` [1] is kept over the groups, and `totals` [16] and `sums` [head_dim] are scaled when it rises. Keys are
    computed for steps first_step..end_step of the group. softcap 0 means none.
    """
    signature = types.void(*[types.int64] * 6, types.float32, *[types.int64] * 4)

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        score, weight, sums, totals, highest = (to_pointer(simd, arguments[index]) for index in (0, 1, 7, 9, 10))
        first_step, end_step, first_key, end_key, cap, head_dim = (arguments[index] for index in (2, 3, 4, 5, 6, 8))
        zero, whole = ir.Constant(I64, 0), ir.Constant(I64, GROUP)

        def raise_highest(values: Value) -> Value:
            """Takes the scores' maxima into account and returns what is the highest now, in all lanes."""
            old = simd.load(highest, F32, 4)
            is_higher = builder.bitcast(builder.fcmp_ordered(">", values, simd.splat(old)), I16)
            with builder.if_then(builder.icmp_unsigned("!=", is_higher, ir.Constant(I16, 0)), likely=False):
                top = simd.splat(simd.max(values))
                factor = _power_of_two(simd, simd.sub(simd.splat(old), top))
                simd.store(builder.extract_element(top, ir.Constant(I32, 0)), highest, 4)
                simd.store_f32(simd.mul(simd.load_f32(totals), factor), totals)
                with simd.loop(num_vectors(simd, head_dim)) as vector:
                    place = simd.at(sums, simd.times(vector, LANES * 4))
                    simd.store_f32(simd.mul(simd.load_f32(place), factor), place)
            return simd.broadcast_f32(highest)

        def emit_whole() -> None:
            values = [simd.load_f32(simd.at(score, chunk * CHUNK * 4)) for chunk in range(GROUP // CHUNK)]
            maxima = values
            while len(maxima) > 1:
                maxima = [_larger(simd, *maxima[index : index + 2]) for index in range(0, len(maxima), 2)]
            top = raise_highest(maxima[0])
            total = simd.load_f32(totals)
            for step in range(STEPS_OF_GROUP):
                powers = [_power_of_two(simd, simd.sub(value, top)) for value in values[2 * step : 2 * step + 2]]
                for power in powers:
                    total = simd.add(total, power)
                _store_weights(simd, powers, simd.at(weight, step * STEP * 2))
            simd.store_f32(total, totals)

        def emit_part() -> None:
            lanes = ir.Constant(I32X16, list(range(LANES)))
            seen_from, seen_to = (simd.splat(builder.trunc(key, I32)) for key in (first_key, end_key))
            first_chunk, num_steps = simd.times(first_step, 2), builder.sub(end_step, first_step)

            def is_seen(chunk: Value) -> Value:
                keys = builder.add(simd.splat(builder.trunc(simd.times(chunk, CHUNK), I32)), lanes)
                return builder.and_(builder.icmp_signed(">=", keys, seen_from), builder.icmp_signed("<", keys, seen_to))

            maxima = simd.variable(simd.splat_f32(MASKED))
            with simd.loop(simd.times(num_steps, 2)) as index:
                chunk = builder.add(first_chunk, index)
                place = simd.at(score, simd.times(chunk, CHUNK * 4))
                value = cap_scores(simd, simd.load_f32(place), cap)
                value = builder.select(is_seen(chunk), value, simd.splat_f32(MASKED))
                simd.store_f32(value, place)
                simd.put(maxima, _larger(simd, value, simd.get(maxima)))
            top = raise_highest(simd.get(maxima))
            total = simd.variable(simd.load_f32(totals))
            with simd.loop(num_steps) as index:
                step = builder.add(first_step, index)
                powers = []
                for half in range(2):
                    chunk = builder.add(simd.times(step, 2), ir.Constant(I64, half))
                    value = simd.load_f32(simd.at(score, simd.times(chunk, CHUNK * 4)))
                    power = _power_of_two(simd, simd.sub(value, top))
                    powers.append(builder.select(is_seen(chunk), power, simd.splat_f32(0.0)))
                    simd.put(total, simd.add(simd.get(total), powers[-1]))
                _store_weights(simd, powers, simd.at(weight, simd.times(step, STEP * 2)))
            simd.store_f32(simd.get(total), totals)

        sees_all = builder.and_(builder.icmp_signed("<=", first_key, zero), builder.icmp_signed(">=", end_key, whole))
        is_whole = builder.and_(sees_all, builder.fcmp_ordered("==", cap, ir.Constant(F32, 0.0)))
        with builder.if_else(is_whole) as (then, otherwise):
            with then:
                emit_whole()
            with otherwise:
                emit_part()
        return context.get_dummy_value()

    return signature, emit


@emitted
def finish_row(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    sums: Any,  # noqa: ARG001
    totals: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    out: Any,  # noqa: ARG001
) -> Emission:
    """out [head_dim] = sums over the total of the sixteen `totals`."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, totals, target = (to_pointer(simd, arguments[index]) for index in (0, 1, 3))
        share = simd.div(simd.splat_f32(1.0), simd.splat(simd.sum(simd.load_f32(totals))))
        with simd.loop(num_vectors(simd, arguments[2])) as vector:
            offset = simd.times(vector, LANES * 4)
            simd.store_f32(simd.mul(simd.load_f32(simd.at(row, offset)), share), simd.at(target, offset))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit
