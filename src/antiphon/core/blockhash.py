"""The chain of block hashes that names KV blocks by their input.

`h_i = BLAKE3(h_{i-1} ‖ u32le token ids of block i)`; the chain starts at the root
`BLAKE3(namespace ‖ scope)`. Only full blocks have a hash. Two prompts share `h_i` exactly when
they share namespace, scope and every token up to the end of block i.

Blocks inside an operator's public prefix chain under the public root; the first block after them
is `BLAKE3(h ‖ tenant scope ‖ ids)`, so that what follows is the tenant's own again.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import TypeAlias

from blake3 import blake3

BlockHash: TypeAlias = bytes

HASH_BYTES = 32


def chain_root(namespace: bytes, scope: bytes) -> BlockHash:
    """The hash before the first block. Lengths are part of the input, so the two cannot be confused."""
    return blake3(
        len(namespace).to_bytes(4, "little") + namespace + len(scope).to_bytes(4, "little") + scope
    ).digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int], scope: bytes = b"") -> BlockHash:
    """The hash of the block with these ids after `parent`. `scope` only where a public prefix ends."""
    return blake3(parent + scope + _u32le(token_ids)).digest()


def chain(root: BlockHash, token_ids: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        parent = block_hash(parent, token_ids[end - block_tokens : end])
        hashes.append(parent)
    return hashes


def _u32le(token_ids: Sequence[int]) -> bytes:
    ids = array.array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
