"""Names of block contents: a chained SHA-256, so that equal names mean equal tokens after equal prefixes.

Cryptographic because requests of different people meet in one cache: nobody may craft a prompt that collides with
another's. The chain starts from tagged extra keys (model, salt); what must never be shared differs there.
"""

from __future__ import annotations

import hashlib
import struct

from kvpilot_engine.core.ids import BlockHash, TokenId


def compute_root_hash(*, model: str, salt: str) -> BlockHash:
    """Start of a chain. Tags and lengths are hashed too, so that no two sets of keys read alike."""
    digest = hashlib.sha256(b"kvpilot-prefix")
    for tag, value in (("model", model), ("salt", salt)):
        for part in (tag.encode(), value.encode()):
            digest.update(struct.pack("<I", len(part)))
            digest.update(part)
    return BlockHash(digest.digest())


def compute_block_hash(parent: BlockHash, token_ids: list[TokenId]) -> BlockHash:
    """Name of a full block that follows the block (or root) named `parent`."""
    return BlockHash(hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest())
