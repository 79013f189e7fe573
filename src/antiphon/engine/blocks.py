"""Accounting of KV blocks: who uses which, which are cached under which hash, which are free.

A block is a number in 0 … num_blocks - 1. Each is in exactly one of three states::

    free    no content
    used    held by at least one open sequence (num_users > 0), with or without a hash
    cached  held by nobody, content kept under its hash until the room is needed

Invariants, checked by `check` whenever the engine is idle: free + cached + used = all; a hash names
at most one block; a block without a hash and without users is free. Eviction is least recently
released first, and of one sequence its last block first, so that chains lose their leaves.

Which hashes came and went since somebody last asked is kept, at most `most_changes` of them. A hash goes
when the block that carries it goes: a second block with the same content never carried it.
A named block has an owner, whom the caller tells by bytes of its own.

Owns no bytes and knows no sequence: the runner is told of evictions by the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from antiphon.core.blockhash import BlockHash

_MOST_CHANGES = 65536


class HashChanges(NamedTuple):
    """Hashes under which blocks are found now and were not before, and the other way round."""

    named: list[BlockHash]
    dropped: list[BlockHash]


class BlockManager:
    """Counts, shares and evicts blocks. Every operation is O(blocks it is given)."""

    def __init__(self, num_blocks: int, most_changes: int = _MOST_CHANGES) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._num_users = [0] * num_blocks
        self._hash: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._owner = [b""] * num_blocks  # of those that have a hash
        self._most_changes = most_changes
        self._changes: dict[BlockHash, bool] | None = {}  # whether it came or went; None: too many

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def find_prefix(self, hashes: list[BlockHash]) -> list[int]:
        """The blocks of the longest leading run of `hashes` that are held. Does not modify."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hashes(self) -> list[BlockHash]:
        """Of all blocks that have one."""
        return list(self._by_hash)

    def take_changes(self) -> HashChanges | None:
        """What has come and gone since the last call, less what did both. None: too much; see `hashes`."""
        changes, self._changes = self._changes, {}
        if changes is None:
            return None
        named = [block_hash for block_hash, is_named in changes.items() if is_named]
        return HashChanges(named, [block_hash for block_hash, is_named in changes.items() if not is_named])

    def num_cached_of(self, blocks: list[int]) -> int:
        """How many of these blocks nobody uses now: taking them lessens `num_available` by as many."""
        return sum(1 for block in blocks if self._num_users[block] == 0)

    def acquire(self, blocks: list[int]) -> None:
        """Use blocks found by `find_prefix` (once more, if they are used already)."""
        for block in blocks:
            if self._num_users[block] == 0:
                del self._cached[block]
            self._num_users[block] += 1

    def refresh(self, blocks: list[int]) -> None:
        """Blocks found by `find_prefix` are evicted after all others now."""
        self.acquire(blocks)
        self.release(blocks)

    def allocate(self, count: int, evicted: list[int]) -> list[int]:
        """Take `count` blocks; those whose content had to go are appended to `evicted`.

        The caller has made sure that `num_available` suffices.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked, {self.num_available} available")
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                evicted.append(block)
            self._num_users[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: BlockHash, owner: bytes = b"") -> int:
        """Name a used, fully computed block. Returns the block that carries the name from now on.

        Where another block has it already, that one gets the caller's use and `block` is freed.
        """
        holder = self._by_hash.get(block_hash)
        if holder is None:
            self._by_hash[block_hash] = block
            self._hash[block] = block_hash
            self._owner[block] = owner
            self._note(block_hash, is_named=True)
            return block
        if holder != block:
            self.acquire([holder])
            self._num_users[block] -= 1
            self._free.append(block)
        return holder

    def release(self, blocks: list[int]) -> None:
        """Give up one use of each. Blocks that lose their last user become cached or free."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def forget(self, owners: Collection[bytes]) -> list[int]:
        """Free the cached blocks of these owners; which they were. What is used stays."""
        forgotten = [block for block in self._cached if self._owner[block] in owners]
        for block in forgotten:
            del self._cached[block]
            self._forget(block)
            self._free.append(block)
        return forgotten

    def is_named(self, block: int) -> bool:
        """Whether it is held under a hash."""
        return self._hash[block] is not None

    def check(self) -> None:
        """Recount everything. Raises AssertionError naming the first thing that is wrong."""
        states = sorted([*self._free, *self._cached, *(b for b, n in enumerate(self._num_users) if n > 0)])
        assert states == list(range(self.num_blocks)), "free + cached + used is not all blocks"
        assert all(self._hash[b] is None for b in self._free), "a free block has a hash"
        assert all(self._hash[b] is not None for b in self._cached), "a cached block has no hash"
        named = {h: b for b, h in enumerate(self._hash) if h is not None}
        assert named == self._by_hash, "hash table and blocks disagree"

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None
        self._hash[block] = None
        del self._by_hash[block_hash]
        self._note(block_hash, is_named=False)

    def _note(self, block_hash: BlockHash, *, is_named: bool) -> None:
        if self._changes is None:
            return
        if block_hash in self._changes:
            del self._changes[block_hash]  # it came and went, or went and came: nothing has changed
        elif len(self._changes) < self._most_changes:
            self._changes[block_hash] = is_named
        else:
            self._changes = None
