"""GGUF's block formats taken apart: from the bytes of rows to whole numbers, scales and minima. Pure numpy.

A weight is scale * integer, or scale * integer + minimum, in one of two manners:

    simple   a half-precision scale (and minimum) for 32 columns
    nested   a half-precision scale (and step of the minima) for 256 columns, times a small integer for 32 or 16 of them

The integers come biased: byte - zero_point is meant. Nothing is rounded here, but by quantize_to_q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

SIMPLE_COLUMNS = 32
NESTED_COLUMNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Rows of a matrix. With `factors` the manner is nested, and the scale of a weight is scale * factor."""

    integers: Bytes
    """[rows, columns]"""
    scales: Halves
    """[rows, columns / 32], nested: [rows, columns / 256]"""
    minima: Halves | None = None
    """Of the shape of `scales`. Simple: added. Nested: times `minimum_factors`, and subtracted."""
    factors: Bytes | None = None
    """[rows, columns / 32], or [rows, columns / 16] of signed bytes"""
    minimum_factors: Bytes | None = None
    """[rows, columns / 32]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    columns: int
    """Of one block."""
    size_bytes: int
    """Of one block."""
    zero_point: int
    split: Callable[[Bytes], BlockParts]
    """Takes [rows, blocks, size_bytes]."""


def _halves(blocks: Bytes, offset: int) -> Halves:
    """The half-precision number at an offset of each block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] to [..., 2, n]: the low half of each byte, then the high one."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _bits(packed: Bytes, width: int) -> Bytes:
    """[..., n] to [..., 8 / width, n]: fields of so many bits, the lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _by_row(values: npt.NDArray[np.uint8]) -> Bytes:
    return values.reshape(values.shape[0], -1)


def _fifth_bits(blocks: Bytes, offset: int) -> Bytes:
    """Bit c of a 32-bit word is the fifth bit of column c: [rows, blocks, 2, 16], already at its place."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., offset : offset + 4]), axis=-1, bitorder="little")
    return bits.reshape(*bits.shape[:-1], 2, 16) << np.uint8(4)


def _split_q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(integers=_by_row(_nibbles(blocks[..., 2:])), scales=_halves(blocks, 0))


def _split_q4_1(blocks: Bytes) -> BlockParts:
    integers = _by_row(_nibbles(blocks[..., 4:]))
    return BlockParts(integers=integers, scales=_halves(blocks, 0), minima=_halves(blocks, 2))


def _split_q5_0(blocks: Bytes) -> BlockParts:
    # Sixteen is meant as zero; the packed layout of eight bits means 128.
    integers = _by_row(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)) + np.uint8(128 - 16)
    return BlockParts(integers=integers, scales=_halves(blocks, 0))


def _split_q5_1(blocks: Bytes) -> BlockParts:
    integers = _by_row(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4))
    return BlockParts(integers=integers, scales=_halves(blocks, 0), minima=_halves(blocks, 2))


def _split_q8_0(blocks: Bytes) -> BlockParts:
    # From two's complement to biased by 128: the highest bit turned over.
    return BlockParts(integers=_by_row(blocks[..., 2:] ^ np.uint8(128)), scales=_halves(blocks, 0))


def _six_bit_factors(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight factors of scales and eight of minima from twelve bytes.

    The first four of each are the low six bits of bytes 0-3 and 4-7; of the others, the low four bits are the halves of
    bytes 8-11, the high two bits the rest of bytes 0-3 and 4-7.
    """
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=-1)
    return _by_row(scales), _by_row(minima)


def _split_q4_k(blocks: Bytes) -> BlockParts:
    factors, minimum_factors = _six_bit_factors(blocks[..., 4:16])
    return BlockParts(
        integers=_by_row(_nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))),
        scales=_halves(blocks, 0),
        minima=_halves(blocks, 2),
        factors=factors,
        minimum_factors=minimum_factors,
    )


def _split_q5_k(blocks: Bytes) -> BlockParts:
    factors, minimum_factors = _six_bit_factors(blocks[..., 4:16])
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    high = _bits(blocks[..., 16:48], 1)
    return BlockParts(
        integers=_by_row(low | (high << np.uint8(4))),
        scales=_halves(blocks, 0),
        minima=_halves(blocks, 2),
        factors=factors,
        minimum_factors=minimum_factors,
    )


def _split_q6_k(blocks: Bytes) -> BlockParts:
    """Two halves of 128 columns; in each, 64 bytes of low nibbles and 32 of high pairs of bits."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), 2)
    # 32 is meant as zero; the packed layout means 128.
    integers = _by_row(low | (high << np.uint8(4))) + np.uint8(128 - 32)
    factors = _by_row(np.ascontiguousarray(blocks[..., 192:208]))
    return BlockParts(integers=integers, scales=_halves(blocks, 208), factors=factors)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(columns=32, size_bytes=18, zero_point=8, split=_split_q4_0),
    "Q4_1": BlockFormat(columns=32, size_bytes=20, zero_point=0, split=_split_q4_1),
    "Q5_0": BlockFormat(columns=32, size_bytes=22, zero_point=128, split=_split_q5_0),
    "Q5_1": BlockFormat(columns=32, size_bytes=24, zero_point=0, split=_split_q5_1),
    "Q8_0": BlockFormat(columns=32, size_bytes=34, zero_point=128, split=_split_q8_0),
    "Q4_K": BlockFormat(columns=256, size_bytes=144, zero_point=0, split=_split_q4_k),
    "Q5_K": BlockFormat(columns=256, size_bytes=176, zero_point=0, split=_split_q5_k),
    "Q6_K": BlockFormat(columns=256, size_bytes=210, zero_point=128, split=_split_q6_k),
}
"""By the name that GGUF gives them."""


def split_blocks(storage: str, data: Bytes) -> BlockParts:
    """Rows of a matrix, [rows, bytes of a row], taken apart."""
    block_format = BLOCK_FORMATS[storage]
    return block_format.split(data.reshape(data.shape[0], -1, block_format.size_bytes))


def quantize_to_q8_0(values: npt.NDArray[np.float32]) -> BlockParts:
    """The nearest Q8_0 for rows of float32, columns a multiple of 32: scale = largest magnitude of 32 columns / 127.

    The integers are those nearest for the scale as it is stored, not for the scale before it was rounded to half
    precision.
    """
    groups = values.reshape(values.shape[0], -1, SIMPLE_COLUMNS)
    scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
    divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    integers = np.clip(np.rint(groups / divisors[..., None]), -127, 127)
    return BlockParts(integers=_by_row((integers + 128).astype(np.uint8)), scales=scales)
