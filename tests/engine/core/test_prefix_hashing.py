"""Block hashes: equal only for equal tokens after equal prefixes under equal keys."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.prefix_hashing import compute_block_hash, compute_root_hash


def tokens(*values: int) -> list[TokenId]:
    return [TokenId(value) for value in values]


def test_hash_depends_on_the_whole_prefix() -> None:
    root = compute_root_hash(model="m", salt="")
    after_one = compute_block_hash(compute_block_hash(root, tokens(1, 2)), tokens(3, 4))
    after_other = compute_block_hash(compute_block_hash(root, tokens(2, 1)), tokens(3, 4))
    assert after_one != after_other
    assert after_one != compute_block_hash(root, tokens(3, 4))


def test_hash_is_the_same_in_every_process() -> None:  # A10
    """Not Python's hash(): that is seeded per process and can be collided with."""
    digest = compute_block_hash(compute_root_hash(model="m", salt="s"), tokens(1, 2, 3))
    assert digest.hex() == "19d83d3ac22ea8269890c28032c6ed108831c57eb3050e8d5152cab096890fdf"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("m", "a"), ("m", "b")),
        (("m", ""), ("n", "")),
        (("ab", ""), ("a", "b")),
        (("m", "salt"), ("msalt", "")),
        (("", "x"), ("x", "")),
    ],
)
def test_different_keys_start_different_chains(one: tuple[str, str], other: tuple[str, str]) -> None:  # A12
    assert compute_root_hash(model=one[0], salt=one[1]) != compute_root_hash(model=other[0], salt=other[1])
