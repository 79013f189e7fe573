"""Verified KV blocks in this process's memory, in front of the store.

Owns the payloads, a bound on their bytes, and the order in which they go. Invariants: never more than
`budget_bytes`; a payload is returned only for the hash it was put under, and only to the scope it was
put by (the hash covers the scope; this is the second lock on the door).

What goes first: the block used longest ago, where a block counts as used `depth_s` earlier for every
block before it in its chain. Blocks of one chain, used together, so go from the leaf to the root; and
a block that an answer filled later than its parent goes before it all the same, as long as blocks fill
in less than `depth_s` each. Public blocks count as used `public_s` later than they were, hot ones up
to `_MOST_HOT` times `hot_s`: pins that wear off, so that nothing can fill the tier for good.

Thread-safe; every call is short. Payloads are kept as they come, a view keeps the value under it alive.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from antiphon.core.blockhash import PUBLIC_SCOPE, BlockHash
from antiphon.core.clock import Clock
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.core.scope import tenant_part_of
from antiphon.kv.events import Change, Directory

Payload: TypeAlias = bytes | memoryview

ENTRY_BYTES = 512  # what an entry costs beside its payload: header and MAC of the value, objects
_MOST_HOT = 8


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`budget_bytes` 0: the tier is off."""

    budget_bytes: int
    depth_s: float = 1.0  # a block of 32 tokens fills in 1 s at 32 tokens/s
    public_s: float = 3600.0
    hot_s: float = 30.0


@dataclass(slots=True)
class _Entry:
    payload: Payload
    scope: bytes
    rank_s: float  # last use, less its depth, plus its pins: the lowest goes first
    num_hits: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.payload) + ENTRY_BYTES


class HostTier:
    """Blocks by hash."""

    def __init__(self, settings: HostSettings, clock: Clock, directory: Directory) -> None:
        self._settings = settings
        self._clock = clock
        self._directory = directory
        self._lock = threading.Lock()
        self._entries: dict[BlockHash, _Entry] = {}
        # One item an entry. Ranks only grow, so a stale item comes up early and is put back.
        self._heap: list[tuple[float, int, BlockHash]] = []
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a payload of this size fits at all."""
        return num_bytes + ENTRY_BYTES <= self._settings.budget_bytes

    def run(self, blocks: Sequence[KvBlock]) -> list[Payload]:
        """The payloads of the first blocks, up to the first one that is not here. They count as used."""
        found: list[Payload] = []
        now = self._clock.now()
        with self._lock:
            for block in blocks:
                entry = self._entries.get(block.hash)
                if entry is None or entry.scope != block.scope:
                    break
                entry.num_hits += 1
                entry.rank_s = max(entry.rank_s, self._rank_s(block, entry.num_hits, now))
                found.append(entry.payload)
        return found

    def touch(self, blocks: Sequence[KvBlock]) -> None:
        """These were used elsewhere: whatever is here of them stays as long as what follows them."""
        now = self._clock.now()
        with self._lock:
            for block in blocks:
                entry = self._entries.get(block.hash)
                if entry is not None:
                    entry.rank_s = max(entry.rank_s, self._rank_s(block, entry.num_hits, now))

    def put(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        """Take these in; what is here already counts as used. What no longer fits goes."""
        stored = []
        now = self._clock.now()
        with self._lock:
            for block, payload in blocks:
                if not self.can_hold(len(payload)):
                    continue
                entry = self._entries.get(block.hash)
                if entry is not None:
                    entry.rank_s = max(entry.rank_s, self._rank_s(block, entry.num_hits, now))
                    continue
                entry = _Entry(payload, block.scope, self._rank_s(block, 0, now))
                self._entries[block.hash] = entry
                heapq.heappush(self._heap, (entry.rank_s, -block.index, block.hash))
                self.num_bytes += entry.num_bytes
                stored.append(block.hash)
            self._directory.record(Change.STORED, Tier.HOST, stored)
            self._directory.record(Change.REMOVED, Tier.HOST, self._shrink())

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop all blocks of these tenants, each by what its scopes begin with."""
        with self._lock:
            forgotten = [h for h, entry in self._entries.items() if tenant_part_of(entry.scope) in tenants]
            for block_hash in forgotten:
                self.num_bytes -= self._entries.pop(block_hash).num_bytes
            self._heap = [item for item in self._heap if item[2] in self._entries]
            heapq.heapify(self._heap)
            self._directory.record(Change.REMOVED, Tier.HOST, forgotten)

    def _shrink(self) -> list[BlockHash]:
        removed = []
        while self.num_bytes > self._settings.budget_bytes:
            rank_s, depth, block_hash = self._heap[0]
            entry = self._entries[block_hash]
            if entry.rank_s > rank_s:
                heapq.heapreplace(self._heap, (entry.rank_s, depth, block_hash))
                continue
            heapq.heappop(self._heap)
            del self._entries[block_hash]
            self.num_bytes -= entry.num_bytes
            self.num_evicted += 1
            removed.append(block_hash)
        return removed

    def _rank_s(self, block: KvBlock, num_hits: int, now: float) -> float:
        settings = self._settings
        pinned_s = settings.hot_s * min(num_hits, _MOST_HOT)
        if block.scope == PUBLIC_SCOPE:
            pinned_s += settings.public_s
        return now - settings.depth_s * block.index + pinned_s
