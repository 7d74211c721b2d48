"""Identities that cross boundaries, as distinct types so that a block id is never taken for a token id."""

from __future__ import annotations

from typing import NewType

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
RequestId = NewType("RequestId", str)
BlockHash = NewType("BlockHash", bytes)

NULL_BLOCK = BlockId(0)
"""Never allocated and never moved: the place that padding points to."""
