"""Paged attention in plain torch: the reference that every other backend is compared with.

Exactness: a row's bits are the same in prefill, decode and recompute, alone and in company. So every matrix product has
one fixed shape, whatever the batch is:

    queries   [QUERY_TILE * heads_per_kv, head_dim]   QUERY_TILE rows of one sequence, the query heads of one kv head
    keys      [KEY_GROUP, head_dim]                   positions from a multiple of KEY_GROUP, whatever the block size

and the groups' partial sums are added in the order of positions. (tile, group) pairs are laid out group after group,
tiles sorted by their number of groups, so that the g-th addition of all tiles is one slice:

    pairs   g0: t0 t1 t2 t3 | g1: t0 t1 t2 | g2: t0          offsets 0, 4, 7; t0 is the longest

Keys past a row's position or before its window are masked: they add exact zeros. Keys past the end of the sequence or
before the window of a tile's first row are read from the null block, never from a slot that holds whatever was there
before (0 * NaN is NaN). With a window g0 is a tile's first group that is not wholly before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpilot_engine.layers.attention import AttentionMetadata, AttentionShape, LayerKV
from kvpilot_engine.layers.norm import softcap

QUERY_TILE = 4
"""Decode fills one row of a tile, prefill all: more rows make prefill faster and decode slower."""
KEY_GROUP = 64
"""Measured against 16 on SmolLM2: decode of 8 sequences 1.6 times faster, prefill 1.4 times."""
MAX_PAIRS = 512
"""Most (tile, group) pairs at once: bounds the workspace. Tiles are independent, so it changes no bit."""

_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TilePairs:
    """Some tiles and all their key groups."""

    query_rows: Tensor
    """[tiles * QUERY_TILE]: rows of the step; short tiles repeat their last row."""
    output_rows: Tensor
    """[valid]: rows of the step that the tiles' valid rows belong to."""
    output_sources: Tensor
    """[valid]: the same rows as indices into tiles * QUERY_TILE."""
    pair_tiles: Tensor
    """[pairs]: the tile of each pair."""
    kv_rows: Tensor
    """[pairs * kv_heads * KEY_GROUP]: rows of the storage seen as [blocks * kv_heads * block_size, head_dim]."""
    masked: Tensor
    """[pairs, 1, QUERY_TILE, 1, KEY_GROUP]: True where the query doesn't see the key."""
    slabs: tuple[tuple[int, int], ...]
    """(offset, tiles) of every key group after the first."""


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    num_rows: int
    write_rows: Tensor
    """[rows * kv_heads]: rows of the layer's storage that this step writes."""
    tiles: dict[int | None, tuple[TilePairs, ...]]
    """By window."""


class TorchAttention:
    """AttentionBackend over float32 tensors on the CPU."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, metadata: AttentionMetadata) -> TorchAttentionPlan:
        slots = metadata.slot_mapping.numpy()
        write_rows = self._storage_rows(slots // metadata.block_size, slots % metadata.block_size, metadata.block_size)
        return TorchAttentionPlan(
            num_rows=metadata.num_rows,
            write_rows=torch.from_numpy(write_rows.reshape(-1)),
            tiles={window: self._plan_tiles(metadata, window) for window in self._shape.windows},
        )

    def write_kv(self, layer: LayerKV, keys: Tensor, values: Tensor, plan: TorchAttentionPlan) -> None:
        head_dim = self._shape.head_dim
        layer.keys.view(-1, head_dim).index_copy_(0, plan.write_rows, keys.reshape(-1, head_dim))
        layer.values.view(-1, head_dim).index_copy_(0, plan.write_rows, values.reshape(-1, head_dim))

    def forward(self, queries: Tensor, layer: LayerKV, plan: TorchAttentionPlan, window: int | None = None) -> Tensor:
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        scaled = queries * self._shape.scale
        for tiles in plan.tiles[window]:
            self._attend(scaled, layer, tiles, output)
        return output

    def _attend(self, queries: Tensor, layer: LayerKV, tiles: TilePairs, output: Tensor) -> None:
        shape = self._shape
        kv_heads, per_kv, head_dim = shape.num_kv_heads, shape.heads_per_kv, shape.head_dim
        num_pairs, tile_heads = tiles.pair_tiles.numel(), QUERY_TILE * per_kv
        per_tile = (
            queries.index_select(0, tiles.query_rows)
            .view(-1, QUERY_TILE, kv_heads, per_kv, head_dim)
            .transpose(1, 2)
            .reshape(-1, kv_heads, tile_heads, head_dim)
        )
        num_tiles = per_tile.shape[0]
        per_pair = per_tile.index_select(0, tiles.pair_tiles).view(-1, tile_heads, head_dim)

        keys = layer.keys.view(-1, head_dim).index_select(0, tiles.kv_rows).view(-1, KEY_GROUP, head_dim)
        scores = torch.bmm(per_pair, keys.transpose(1, 2))
        del keys, per_pair
        if shape.softcap is not None:
            softcap(scores, shape.softcap)
        scores.view(num_pairs, kv_heads, QUERY_TILE, per_kv, KEY_GROUP).masked_fill_(tiles.masked, float("-inf"))
        scores = scores.view(num_pairs, kv_heads, tile_heads, KEY_GROUP)

        group_max = scores.amax(dim=-1)
        row_max = group_max[:num_tiles]
        for offset, count in tiles.slabs:
            torch.maximum(row_max[:count], group_max[offset : offset + count], out=row_max[:count])
        scores.sub_(row_max.index_select(0, tiles.pair_tiles).unsqueeze(-1)).exp_()

        group_sum = scores.sum(dim=-1)
        values = layer.values.view(-1, head_dim).index_select(0, tiles.kv_rows).view(-1, KEY_GROUP, head_dim)
        weighted = torch.bmm(scores.view(-1, tile_heads, KEY_GROUP), values).view(
            num_pairs, kv_heads, tile_heads, head_dim
        )
        row_sum, row_weighted = group_sum[:num_tiles], weighted[:num_tiles]
        for offset, count in tiles.slabs:
            row_sum[:count] += group_sum[offset : offset + count]
            row_weighted[:count] += weighted[offset : offset + count]

        rows = (
            (row_weighted / row_sum.unsqueeze(-1))
            .view(num_tiles, kv_heads, QUERY_TILE, per_kv, head_dim)
            .transpose(1, 2)
            .reshape(-1, kv_heads * per_kv, head_dim)
        )
        output.index_copy_(0, tiles.output_rows, rows.index_select(0, tiles.output_sources))

    def _plan_tiles(self, metadata: AttentionMetadata, window: int | None) -> tuple[TilePairs, ...]:
        starts = metadata.query_start.numpy()
        lengths = metadata.seq_lens.numpy()
        counts = np.diff(starts)
        tiles_per_seq = -(-counts // QUERY_TILE)
        tile_seq = np.repeat(np.arange(len(lengths)), tiles_per_seq)
        first_tile = np.cumsum(tiles_per_seq) - tiles_per_seq
        tile_offset = (np.arange(len(tile_seq)) - first_tile[tile_seq]) * QUERY_TILE
        tile_rows = np.minimum(counts[tile_seq] - tile_offset, QUERY_TILE)
        first_position = lengths[tile_seq] - counts[tile_seq] + tile_offset
        first_seen = np.zeros_like(first_position) if window is None else np.maximum(first_position - window + 1, 0)
        num_groups = (first_position + tile_rows - 1) // KEY_GROUP + 1 - first_seen // KEY_GROUP
        order = np.argsort(-num_groups, kind="stable")

        planned: list[TilePairs] = []
        begin = 0
        pairs_before = np.concatenate([[0], np.cumsum(num_groups[order])])
        while begin < len(order):
            end = max(begin + 1, int(np.searchsorted(pairs_before, pairs_before[begin] + MAX_PAIRS, side="right")) - 1)
            chosen = order[begin:end]
            planned.append(
                self._plan_pairs(
                    metadata,
                    tile_seq[chosen],
                    starts[tile_seq[chosen]] + tile_offset[chosen],
                    tile_rows[chosen],
                    first_position[chosen],
                    first_seen[chosen],
                    num_groups[chosen],
                    window,
                )
            )
            begin = end
        return tuple(planned)

    def _plan_pairs(
        self,
        metadata: AttentionMetadata,
        tile_seq: _IntArray,
        first_row: _IntArray,
        num_rows: _IntArray,
        first_position: _IntArray,
        first_seen: _IntArray,
        num_groups: _IntArray,
        window: int | None,
    ) -> TilePairs:
        in_tile = np.arange(QUERY_TILE)
        is_valid = in_tile[None, :] < num_rows[:, None]
        clipped = np.minimum(in_tile[None, :], num_rows[:, None] - 1)
        rows = first_row[:, None] + clipped
        positions = first_position[:, None] + clipped

        # tiles are sorted by falling num_groups: group g belongs to the first `count` of them
        counts = [int(np.searchsorted(-num_groups, -group, side="left")) for group in range(int(num_groups[0]))]
        pair_tiles = np.concatenate([np.arange(count) for count in counts])
        pair_groups = np.repeat(np.arange(len(counts)), counts) + first_seen[pair_tiles] // KEY_GROUP
        offsets = np.cumsum(counts) - counts

        key_positions = pair_groups[:, None] * KEY_GROUP + np.arange(KEY_GROUP)[None, :]
        pair_seq = tile_seq[pair_tiles]
        exists = key_positions < metadata.seq_lens.numpy()[pair_seq][:, None]
        exists &= key_positions >= first_seen[pair_tiles][:, None]
        tables = metadata.block_tables.numpy()
        column = np.where(exists, key_positions // metadata.block_size, 0)
        blocks = np.where(exists, tables[pair_seq[:, None], column], 0)
        within = np.where(exists, key_positions % metadata.block_size, 0)
        kv_rows = self._storage_rows(blocks, within, metadata.block_size).swapaxes(1, 2)
        masked = key_positions[:, None, :] > positions[pair_tiles][:, :, None]
        if window is not None:
            masked |= key_positions[:, None, :] <= positions[pair_tiles][:, :, None] - window
        return TilePairs(
            query_rows=torch.from_numpy(rows.reshape(-1)),
            output_rows=torch.from_numpy(rows[is_valid]),
            output_sources=torch.from_numpy(np.flatnonzero(is_valid.reshape(-1))),
            pair_tiles=torch.from_numpy(pair_tiles),
            kv_rows=torch.from_numpy(np.ascontiguousarray(kv_rows).reshape(-1)),
            masked=torch.from_numpy(masked)[:, None, :, None, :],
            slabs=tuple((int(offset), count) for offset, count in zip(offsets[1:], counts[1:], strict=True)),
        )

    def _storage_rows(self, blocks: _IntArray, within: _IntArray, block_size: int) -> _IntArray:
        """[..., kv_heads] row numbers of (block, kv head, offset) in [blocks * kv_heads * block_size, head_dim]."""
        kv_heads = self._shape.num_kv_heads
        return (blocks[..., None] * kv_heads + np.arange(kv_heads)) * block_size + within[..., None]
