"""The keys of a prompt's blocks, as the workers of one namespace name them.

Owns one prompt's chain: hashes of `core/blockhash.extend_chain` cut to what the wire carries. Computed as
far as it is asked for, since a prompt that nobody knows need not be hashed to its end: about 0.6 µs a block
of 16 tokens. Only blocks that a worker could take over have keys: never all of a prompt's tokens.
"""

from __future__ import annotations

from antiphon.core.blockhash import BlockHash, Border, extend_chain, root_of
from antiphon.core.generation import Generation
from antiphon.core.wire import pack_keys, unpack_keys


class PromptKeys:
    """The chain of one generation's blocks. Nothing is in it where `block_tokens` makes no sense."""

    def __init__(self, generation: Generation, namespace: bytes, block_tokens: int) -> None:
        self.num_blocks = max(0, len(generation.token_ids) - 1) // block_tokens if block_tokens > 0 else 0
        self._token_ids = generation.token_ids
        self._block_tokens = block_tokens
        self._border = Border(generation.num_public_tokens, generation.kv_scope)
        self._hashes: list[BlockHash] = []
        self._keys: list[int] = []
        self._root = b""
        if self.num_blocks:
            num_public = generation.num_public_tokens
            self._root = root_of(namespace, self._border.scope, num_public, block_tokens)

    def upto(self, count: int) -> list[int]:
        """The keys from the first one on: at least `count`, or all. One list: not to be changed."""
        known = len(self._keys)
        count = min(count, self.num_blocks)
        if known < count:
            extend_chain(
                self._hashes, self._root, self._token_ids, self._block_tokens, self._border, most=count
            )
            self._keys += unpack_keys(pack_keys(self._hashes[known:]))
        return self._keys
