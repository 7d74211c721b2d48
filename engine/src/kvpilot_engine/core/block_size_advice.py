"""What the blocks of other sizes would waste on the requests that were really served, and which size to choose.

A last block is filled only in part, by half on average: large blocks waste more, small ones make longer tables.
The waste is counted step by step, as the engine holds it: one that generates its k-th token holds whole blocks for its
prompt and k - 1 tokens. Not counted: shared prefixes, of which larger blocks find a little less. Nothing is changed by
the advice; the size is fixed when the cache is laid out.

Invariant: the sums are those of the newest MAX_REQUESTS requests, exactly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

CANDIDATES = (8, 16, 32, 64, 128)
"""Sizes to choose from: smaller ones make long tables, and larger ones hold a request's whole prompt."""
MAX_REQUESTS = 1024
"""Length of the rolling window, in requests."""
MAX_WASTE_RATIO = 0.02
"""The largest size that wastes no more than this is recommended: below it, shorter tables are worth more."""
LENGTH_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper bounds of the length histograms; one more bucket holds all beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeCost:
    """What one block size costs on the window's traffic, averaged over the steps of all its sequences."""

    block_size: int
    waste_ratio: float
    """Slots that hold no token ÷ slots held, 0..1."""
    wasted_tokens: float
    """Such slots of one sequence."""
    table_len: float
    """Blocks in the table of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeAdvice:
    """Computed from the newest requests; without any, the present size at no cost is recommended."""

    present: BlockSizeCost
    recommended: BlockSizeCost
    candidates: tuple[BlockSizeCost, ...] = ()
    num_requests: int = 0
    """Requests in the window."""
    prompt_lengths: tuple[int, ...] = (0,) * (len(LENGTH_BUCKETS) + 1)
    """Requests in the window by prompt length, one count per bucket of LENGTH_BUCKETS and one for all beyond."""
    output_lengths: tuple[int, ...] = (0,) * (len(LENGTH_BUCKETS) + 1)

    @property
    def saved_tokens(self) -> float:
        """Slots that the recommended size saves a sequence; negative where a larger size buys shorter tables."""
        return self.present.wasted_tokens - self.recommended.wasted_tokens


def build_no_advice(block_size: int) -> BlockSizeAdvice:
    cost = BlockSizeCost(block_size=block_size, waste_ratio=0.0, wasted_tokens=0.0, table_len=0.0)
    return BlockSizeAdvice(present=cost, recommended=cost)


@dataclass(slots=True)
class _Lengths:
    """Sums over the window."""

    num_steps: int = 0
    num_tokens: int = 0
    num_wasted: dict[int, int] = field(default_factory=dict)
    prompt_counts: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_BUCKETS) + 1))
    output_counts: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_BUCKETS) + 1))


class BlockSizeAdvisor:
    """Fed with the lengths of ended sequences; each costs the same few additions, however long it was."""

    def __init__(self, block_size: int, *, max_requests: int = MAX_REQUESTS) -> None:
        """`block_size`: the one in force, any size."""
        self._present = block_size
        self._sizes = tuple(sorted({*CANDIDATES, block_size}))
        self._max_requests = max_requests
        self._window: deque[tuple[int, int]] = deque()
        self._sums = _Lengths(num_wasted=dict.fromkeys(self._sizes, 0))
        self._advice: BlockSizeAdvice | None = None

    def note(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A sequence ended. One without output held its blocks for its prompt's steps only and is left out."""
        if num_output_tokens == 0:
            return
        self._advice = None
        self._window.append((num_prompt_tokens, num_output_tokens))
        self._add(num_prompt_tokens, num_output_tokens, 1)
        if len(self._window) > self._max_requests:
            self._add(*self._window.popleft(), -1)

    def advise(self) -> BlockSizeAdvice:
        if self._advice is None:
            self._advice = self._compute() if self._window else build_no_advice(self._present)
        return self._advice

    def _add(self, num_prompt_tokens: int, num_output_tokens: int, sign: int) -> None:
        sums = self._sums
        first, last = num_prompt_tokens, num_prompt_tokens + num_output_tokens - 1
        sums.num_steps += sign * num_output_tokens
        sums.num_tokens += sign * ((first + last) * num_output_tokens // 2)
        for size in self._sizes:
            sums.num_wasted[size] += sign * (_sum_wasted(last, size) - _sum_wasted(first - 1, size))
        sums.prompt_counts[_bucket(num_prompt_tokens)] += sign
        sums.output_counts[_bucket(num_output_tokens)] += sign

    def _compute(self) -> BlockSizeAdvice:
        costs = {size: self._cost(size) for size in self._sizes}
        candidates = tuple(costs[size] for size in CANDIDATES)
        frugal = [cost for cost in candidates if cost.waste_ratio <= MAX_WASTE_RATIO]
        return BlockSizeAdvice(
            present=costs[self._present],
            recommended=frugal[-1] if frugal else candidates[0],
            candidates=candidates,
            num_requests=len(self._window),
            prompt_lengths=tuple(self._sums.prompt_counts),
            output_lengths=tuple(self._sums.output_counts),
        )

    def _cost(self, size: int) -> BlockSizeCost:
        sums = self._sums
        num_slots = sums.num_tokens + sums.num_wasted[size]
        return BlockSizeCost(
            block_size=size,
            waste_ratio=sums.num_wasted[size] / num_slots,
            wasted_tokens=sums.num_wasted[size] / sums.num_steps,
            table_len=num_slots / size / sums.num_steps,
        )


def _sum_wasted(last: int, size: int) -> int:
    """Unused slots of the last block, added up over lengths 0, 1, …, last."""
    num_whole, rest = divmod(last + 1, size)
    # A round of lengths wastes 0, size - 1, …, 1; the rest begins one more.
    num_begun = max(0, rest - 1)
    return num_whole * (size * (size - 1) // 2) + num_begun * size - num_begun * (num_begun + 1) // 2


def _bucket(num_tokens: int) -> int:
    return next((i for i, bound in enumerate(LENGTH_BUCKETS) if num_tokens <= bound), len(LENGTH_BUCKETS))
