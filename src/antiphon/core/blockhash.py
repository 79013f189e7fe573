"""The chain of block hashes that names KV blocks by their input.

`h_i = BLAKE3(h_{i-1} ‖ u32le token ids of block i)`; the chain starts at the root
`BLAKE3(namespace ‖ scope)`. Only full blocks have a hash. Two prompts share `h_i` exactly when
they share namespace, scope and every token up to the end of block i.

Blocks inside an operator's public prefix chain under the public root; the first block after them
is `BLAKE3(h ‖ tenant scope ‖ ids)`, so that what follows is the tenant's own again. A block that is
only partly public is the tenant's. A scope is never empty and never `PUBLIC_SCOPE`
(core/generation.py), so two tenants share what is public and nothing else.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from blake3 import blake3

BlockHash: TypeAlias = bytes

HASH_BYTES = 32
_ID_BYTES = 4
PUBLIC_SCOPE = b"public"


class Border(NamedTuple):
    """Where a public prefix ends and whose scope begins there."""

    num_public_tokens: int = 0
    scope: bytes = b""

    def scope_of(self, index: int, block_tokens: int) -> bytes:
        """Whose the block at `index` is."""
        return PUBLIC_SCOPE if index < self.num_public_tokens // block_tokens else self.scope


def chain_root(namespace: bytes, scope: bytes) -> BlockHash:
    """The hash before the first block. Lengths are part of the input, so the two cannot be confused."""
    return blake3(
        len(namespace).to_bytes(4, "little") + namespace + len(scope).to_bytes(4, "little") + scope
    ).digest()


def root_of(namespace: bytes, scope: bytes, num_public_tokens: int, block_tokens: int) -> BlockHash:
    """The root of a prompt's chain: everybody's where its first block is public, else the tenant's."""
    return chain_root(namespace, Border(num_public_tokens, scope).scope_of(0, block_tokens))


def block_hash(parent: BlockHash, token_ids: Sequence[int], scope: bytes = b"") -> BlockHash:
    """The hash of the block with these ids after `parent`. `scope` only where a public prefix ends."""
    return blake3(parent + scope + _u32le(token_ids)).digest()


def extend_chain(
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    border: Border,
    most: int | None = None,
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it does not hold yet.

    Not past `most` hashes in all: for who may not need the whole chain.
    """
    start, end = len(hashes), len(token_ids) // block_tokens
    if most is not None:
        end = min(end, most)
    if start >= end:
        return
    size = _ID_BYTES * block_tokens
    ids = _u32le(token_ids[start * block_tokens : end * block_tokens])
    public_blocks = border.num_public_tokens // block_tokens
    parent = hashes[-1] if hashes else root
    for index in range(start, end):
        scope = border.scope if public_blocks and index == public_blocks else b""
        offset = (index - start) * size
        parent = blake3(parent + scope + ids[offset : offset + size]).digest()
        hashes.append(parent)


def _u32le(token_ids: Sequence[int]) -> bytes:
    ids = array.array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
