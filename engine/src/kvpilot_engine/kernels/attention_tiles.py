"""The innermost steps of paged attention as vector code: scores, softmax and weighted values of a few query rows.

Not for which keys belong to whom (paged_attention). Invariant: a row's bits depend neither on the rows beside it nor on
how many keys are computed at once: a score is one chain of fused multiply-adds over the head's elements, a weighted
value one over the keys, both in rising order.

Numbers come and go by address. A chunk is 16 keys of one sequence: one run of them, or two of 8 where blocks hold 8.

    keys of a run        [head_dim, lanes]        one vector load gives one element of `lanes` keys
    values of a run      [lanes, head_dim]
    query rows           [head_dim, rows]         packed: the rows of a tile lie side by side
    scores               [rows, KEY_GROUP] float32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.cpu_features import DotPath, dot_path
from kvpilot_engine.kernels.jit import emitted
from kvpilot_engine.kernels.simd import F16, F32, F32X16, I1, I32, I32X16, I64, LANES, POINTER, Simd, Value

KEY_GROUP = 128
"""Keys whose softmax is taken at once; the results of groups are joined in rising order."""
CHUNK = LANES
CHUNKS_AHEAD = 4
"""So many entries of chunks stand in a table of addresses behind those that are computed, to be fetched early."""
HALF_BYTES = 2
MASKED = -1.0e30
"""Below every score, and finite: the difference of two masked ones is 0, not NaN."""
_LARGEST_HALF = 65504.0

Emission = tuple[Any, Callable[..., Any]]


def _constants(*kinds: Any) -> list[int]:
    return [int(kind.literal_value) for kind in kinds]


def to_pointer(simd: Simd, address: Value) -> Value:
    return simd.builder.inttoptr(address, POINTER)


def _load_elements(simd: Simd, pointer: Value, element_bytes: int) -> Value:
    return simd.load_f16(pointer) if element_bytes == HALF_BYTES else simd.load_f32(pointer)


def _load_keys(simd: Simd, runs: list[Value], offset: Value, element_bytes: int) -> Value:
    """One element of a chunk's 16 keys."""
    if len(runs) == 1:
        return _load_elements(simd, simd.at(runs[0], offset), element_bytes)
    scalar = F16 if element_bytes == HALF_BYTES else F32
    half = ir.VectorType(scalar, LANES // 2)
    low, high = (simd.load(simd.at(run, offset), half, element_bytes) for run in runs)
    joined = simd.builder.shuffle_vector(low, high, ir.Constant(I32X16, list(range(LANES))))
    return simd.builder.fpext(joined, F32X16) if element_bytes == HALF_BYTES else joined


@emitted
def largest_tile(typing_context: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """Most rows that a tile can have here: their sums must fit in the registers."""
    return types.int64(), lambda *_: ir.Constant(I64, _ROWS_WIDE if _has_wide_registers() else _ROWS_NARROW)


_ROWS_WIDE, _ROWS_NARROW = 12, 6


def _has_wide_registers() -> bool:
    return dot_path() is DotPath.AVX512_VNNI


def _vectors_at_once(rows: int) -> int:
    """How many vectors a tile of so many rows computes side by side, so that additions need not wait for each other."""
    registers = 24 if _has_wide_registers() else 6
    return max(1, min(4, registers // rows))


def emit_in_steps(simd: Simd, total: Value, step: int, emit_step: Callable[[Value, int], None]) -> None:
    """emit_step(first, count) for as many whole steps as there are, then one by one."""
    num_steps = simd.builder.udiv(total, ir.Constant(I64, step))
    with simd.loop(num_steps) as index:
        emit_step(simd.times(index, step), step)
    if step > 1:
        done = simd.times(num_steps, step)
        with simd.loop(simd.builder.sub(total, done)) as index:
            emit_step(simd.builder.add(done, index), 1)


@emitted
def score_tile(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    num_rows: Any,
    lanes: Any,
    storage: Any,
    queries: Any,  # noqa: ARG001
    runs: Any,  # noqa: ARG001
    num_chunks: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    scores: Any,  # noqa: ARG001
    needed_soon: Any,  # noqa: ARG001
) -> Emission:
    """scores[r, :16 * num_chunks] = queries[:, r] · keys.

    num_rows and lanes are constants, `storage` is an array of the cache (for its type), `runs` a table of addresses;
    `needed_soon` is another one of the same length: what lies there is fetched into the cache meanwhile.
    """
    rows, width = _constants(num_rows, lanes)
    size = storage.dtype.bitwidth // 8
    runs_per_chunk = CHUNK // width
    signature = types.void(num_rows, lanes, storage, *[types.int64] * 6)

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        query, table, out, soon_table = (to_pointer(simd, arguments[place]) for place in (3, 4, 7, 8))
        num_chunks, head_dim = arguments[5:7]

        def emit_chunks(first: Value, count: int) -> None:
            def read_addresses(table: Value, ahead: int = 0) -> list[Value]:
                entries = simd.at(table, simd.times(builder.add(first, ir.Constant(I64, ahead)), 8 * runs_per_chunk))
                return [
                    to_pointer(simd, simd.load(simd.at(entries, 8 * index), I64, 8))
                    for index in range(count * runs_per_chunk)
                ]

            addresses = read_addresses(table)
            # tiles as wide as this are prefill's, which comes back to the same keys and values many times
            is_decode = rows < _ROWS_WIDE
            soon = read_addresses(soon_table) + read_addresses(table, CHUNKS_AHEAD) if is_decode else []
            sums = [[simd.variable(simd.splat_f32(0.0)) for _ in range(count)] for _ in range(rows)]
            with simd.loop(head_dim) as element:
                offset = simd.times(element, width * size)
                keys = [
                    _load_keys(simd, addresses[chunk * runs_per_chunk : (chunk + 1) * runs_per_chunk], offset, size)
                    for chunk in range(count)
                ]
                for address in soon:
                    simd.prefetch(simd.at(address, offset))
                packed = simd.at(query, simd.times(element, rows * 4))
                for row, places in enumerate(sums):
                    value = simd.broadcast_f32(simd.at(packed, 4 * row))
                    for place, key in zip(places, keys, strict=True):
                        simd.put(place, simd.fma(value, key, simd.get(place)))
            start = simd.at(out, simd.times(first, CHUNK * 4))
            for row, places in enumerate(sums):
                for chunk, place in enumerate(places):
                    simd.store_f32(simd.get(place), simd.at(start, (row * KEY_GROUP + chunk * CHUNK) * 4))

        emit_in_steps(simd, num_chunks, _vectors_at_once(rows), emit_chunks)
        return context.get_dummy_value()

    return signature, emit


@emitted
def weigh_tile(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    num_rows: Any,
    lanes: Any,  # noqa: ARG001
    storage: Any,
    weights: Any,  # noqa: ARG001
    runs: Any,  # noqa: ARG001
    num_keys: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    out: Any,  # noqa: ARG001
) -> Emission:
    """out[r] = the sum of weights[r, key] * values[key] over num_keys keys; num_rows is a constant."""
    (rows,) = _constants(num_rows)
    size = storage.dtype.bitwidth // 8
    signature = types.void(num_rows, types.int64, storage, *[types.int64] * 5)

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        weight, table, target = (to_pointer(simd, arguments[place]) for place in (3, 4, 7))
        lanes, _, _, _, num_keys, head_dim = arguments[1:7]
        value_bytes = simd.times(head_dim, size)
        num_runs = builder.udiv(builder.sub(builder.add(num_keys, lanes), ir.Constant(I64, 1)), lanes)

        def emit_vectors(first: Value, count: int) -> None:
            column = simd.times(first, LANES * size)
            sums = [[simd.variable(simd.splat_f32(0.0)) for _ in range(count)] for _ in range(rows)]
            with simd.loop(num_runs) as run:
                before = simd.times(run, lanes)
                left = builder.sub(num_keys, before)
                in_run = builder.select(builder.icmp_signed("<", left, lanes), left, lanes)
                address = simd.load(simd.at(table, simd.times(run, 8)), I64, 8)
                start = simd.at(to_pointer(simd, address), column)
                its_weights = simd.at(weight, simd.times(before, 4))
                with simd.loop(in_run) as key:
                    row_start = simd.at(start, simd.times(key, value_bytes))
                    values = [_load_elements(simd, simd.at(row_start, v * LANES * size), size) for v in range(count)]
                    of_key = simd.at(its_weights, simd.times(key, 4))
                    for row, places in enumerate(sums):
                        factor = simd.broadcast_f32(simd.at(of_key, row * KEY_GROUP * 4))
                        for place, value in zip(places, values, strict=True):
                            simd.put(place, simd.fma(factor, value, simd.get(place)))
            corner = simd.at(target, simd.times(first, LANES * 4))
            for row, places in enumerate(sums):
                start = simd.at(corner, simd.times(head_dim, 4 * row))
                for vector, place in enumerate(places):
                    simd.store_f32(simd.get(place), simd.at(start, vector * LANES * 4))

        emit_in_steps(simd, num_vectors(simd, head_dim), _vectors_at_once(rows), emit_vectors)
        return context.get_dummy_value()

    return signature, emit


def cap_scores(simd: Simd, scores: Value, softcap: Value) -> Value:
    """softcap * tanh(scores / softcap); the scores where it is 0."""
    builder = simd.builder
    kept = simd.variable(scores)
    with builder.if_then(builder.fcmp_ordered(">", softcap, ir.Constant(F32, 0.0))):
        limit, one, two = simd.splat(softcap), simd.splat_f32(1.0), simd.splat_f32(2.0)
        doubled = simd.div(simd.mul(scores, two), limit)
        tanh = simd.sub(one, simd.div(two, simd.add(simd.exp(doubled), one)))
        simd.put(kept, simd.mul(limit, tanh))
    return simd.get(kept)


@emitted
def softmax_row(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    scores: Any,  # noqa: ARG001
    num_chunks: Any,  # noqa: ARG001
    first_key: Any,  # noqa: ARG001
    end_key: Any,  # noqa: ARG001
    softcap: Any,  # noqa: ARG001
    total: Any,  # noqa: ARG001
) -> Emission:
    """Turn a row of scores into exp(score - highest) in place, 0 outside first_key..end_key; returns the highest.

    The sum goes to `total`. With no key inside, the highest is very low and the sum 0. softcap 0 means none.
    """
    signature = types.float32(*[types.int64] * 4, types.float32, types.int64)

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, out = to_pointer(simd, arguments[0]), to_pointer(simd, arguments[5])
        lanes = ir.Constant(I32X16, list(range(LANES)))
        first, end = (simd.splat(builder.trunc(arguments[place], I32)) for place in (2, 3))
        highest = simd.variable(simd.splat_f32(MASKED))

        def is_seen(chunk: Value) -> Value:
            keys = builder.add(simd.splat(builder.trunc(simd.times(chunk, CHUNK), I32)), lanes)
            return builder.and_(builder.icmp_signed(">=", keys, first), builder.icmp_signed("<", keys, end))

        with simd.loop(arguments[1]) as chunk:
            place = simd.at(row, simd.times(chunk, CHUNK * 4))
            value = cap_scores(simd, simd.load_f32(place), arguments[4])
            value = builder.select(is_seen(chunk), value, simd.splat_f32(MASKED))
            simd.store_f32(value, place)
            simd.put(highest, simd.maximum(simd.get(highest), value))
        top = simd.max(simd.get(highest))
        tops = simd.splat(top)
        sums = simd.variable(simd.splat_f32(0.0))
        with simd.loop(arguments[1]) as chunk:
            place = simd.at(row, simd.times(chunk, CHUNK * 4))
            weight = simd.exp(simd.sub(simd.load_f32(place), tops))
            weight = builder.select(is_seen(chunk), weight, simd.splat_f32(0.0))
            simd.store_f32(weight, place)
            simd.put(sums, simd.add(simd.get(sums), weight))
        simd.store(simd.sum(simd.get(sums)), out, 4)
        return top

    return signature, emit


@emitted
def exp_f32(typing_context: Any, value: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """e**value as softmax_row computes it."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        return builder.extract_element(simd.exp(simd.splat(arguments[0])), ir.Constant(I32, 0))

    return types.float32(types.float32), emit


@emitted
def prefetch_lines(typing_context: Any, address: Any, num_lines: Any) -> Emission:  # noqa: ARG001
    """Ask for so many cache lines from an address on."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        start = to_pointer(simd, arguments[0])
        with simd.loop(arguments[1]) as line:
            simd.prefetch(simd.at(start, simd.times(line, 64)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@emitted
def fetch_add(typing_context: Any, address: Any, amount: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """Add to the int64 at an address as one step that other threads see whole; returns what was there before."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], POINTER), arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@emitted
def is_tiled(typing_context: Any, storage: Any) -> Emission:  # noqa: ARG001 - numba's protocol
    """Whether a cache is kept in tiles of bfloat16, whose bits are int16; half precision is uint16."""
    kept = int(storage.dtype == types.int16)
    return types.boolean(storage), lambda *_: ir.Constant(I1, kept)


@emitted
def store_key(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    storage: Any,
    lanes: Any,  # noqa: ARG001
    source: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    place: Any,  # noqa: ARG001
) -> Emission:
    """Write one key [head_dim] float32 into its lane of a run; `place` is the address of its first element.

    Of a cache in tiles (int16) that is its first pair of elements.
    """
    size = storage.dtype.bitwidth // 8
    in_pairs = storage.dtype == types.int16

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, target = to_pointer(simd, arguments[2]), to_pointer(simd, arguments[4])
        step = simd.times(arguments[1], size)
        if in_pairs:
            pair_bytes = simd.times(arguments[1], 2 * size)
            with simd.loop(num_vectors(simd, arguments[3])) as vector:
                rounded = simd.round_to_bf16(simd.load_f32(simd.at(row, simd.times(vector, LANES * 4))))
                pairs = builder.bitcast(rounded, ir.VectorType(I32, LANES // 2))
                start = simd.at(target, simd.times(pair_bytes, simd.times(vector, LANES // 2)))
                for pair in range(LANES // 2):
                    value = builder.extract_element(pairs, ir.Constant(I32, pair))
                    simd.store(value, simd.at(start, simd.times(pair_bytes, pair)), 4)
            return context.get_dummy_value()
        with simd.loop(num_vectors(simd, arguments[3])) as vector:
            values = _as_stored(simd, simd.load_f32(simd.at(row, simd.times(vector, LANES * 4))), size)
            start = simd.at(target, simd.times(step, simd.times(vector, LANES)))
            for element in range(LANES):
                value = builder.extract_element(values, ir.Constant(I32, element))
                simd.store(value, simd.at(start, simd.times(step, element)), size)
        return context.get_dummy_value()

    return types.void(storage, *[types.int64] * 4), emit


@emitted
def store_value(
    typing_context: Any,  # noqa: ARG001 - numba's protocol
    storage: Any,
    source: Any,  # noqa: ARG001
    head_dim: Any,  # noqa: ARG001
    place: Any,  # noqa: ARG001
) -> Emission:
    """Write one value [head_dim] float32 to its row of a run; of a cache in tiles (int16), to its half of the pairs.

    `place` is the address of its first element.
    """
    size = storage.dtype.bitwidth // 8
    in_pairs = storage.dtype == types.int16

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, target = to_pointer(simd, arguments[1]), to_pointer(simd, arguments[3])
        if in_pairs:
            with simd.loop(num_vectors(simd, arguments[2])) as vector:
                rounded = simd.round_to_bf16(simd.load_f32(simd.at(row, simd.times(vector, LANES * 4))))
                start = simd.at(target, simd.times(vector, LANES * LANES * size))
                for element in range(LANES):
                    value = builder.extract_element(rounded, ir.Constant(I32, element))
                    simd.store(value, simd.at(start, 2 * size * element), size)
            return context.get_dummy_value()
        with simd.loop(num_vectors(simd, arguments[2])) as vector:
            values = _as_stored(simd, simd.load_f32(simd.at(row, simd.times(vector, LANES * 4))), size)
            simd.store(values, simd.at(target, simd.times(vector, LANES * size)), size)
        return context.get_dummy_value()

    return types.void(storage, *[types.int64] * 3), emit


def num_vectors(simd: Simd, head_dim: Value) -> Value:
    return simd.builder.lshr(head_dim, ir.Constant(I64, LANES.bit_length() - 1))


def _as_stored(simd: Simd, values: Value, element_bytes: int) -> Value:
    """Half precision ends at 65504, and an infinity in the cache would spoil every row that sees it."""
    if element_bytes != HALF_BYTES:
        return values
    limited = simd.minimum(values, simd.splat_f32(_LARGEST_HALF))
    limited = simd.maximum(limited, simd.splat_f32(-_LARGEST_HALF))
    return simd.builder.fptrunc(limited, ir.VectorType(F16, LANES))
