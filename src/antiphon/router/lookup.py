"""What is known of one prompt's blocks at one moment: who holds how many of them, what the store can add.

Owns the answers to one walk along the chain (holders.py), made as they are asked for: the chain is hashed
and the store's hints are searched no further than that. To be used at once: what is taken in later may
not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Protocol

from antiphon.router.holders import STRIDE, KeyChain, Walk
from antiphon.router.storehints import StoreHints

_LOOKS = 2  # at so many holders for each one that is wanted: some have gaps


class Holder(Protocol):
    """A replica, and the keys that it holds."""

    @property
    def replica(self) -> int: ...

    @property
    def held(self) -> Mapping[int, int]: ...


class Lookup:
    """One chain's."""

    def __init__(
        self,
        chain: KeyChain,
        walk: Walk,
        replicas: Mapping[int, Holder],
        by_slot: Mapping[int, Holder],
        hints: StoreHints,
        now: float,
    ) -> None:
        self._chain = chain
        self._walk = walk
        self._replicas = replicas
        self._by_slot = by_slot
        self._hints = hints
        self._now = now
        self._spans: list[tuple[int, int]] = []  # runs of blocks that the store has, as far as asked for
        self._asked: dict[int, int] = {}  # answers, by start: most candidates hold the same

    @property
    def end(self) -> int:
        """The first block that no replica holds, or the chain's end."""
        return self._walk.end

    def holders(self, most: int, draw: float) -> list[tuple[int, int]]:
        """At most so many replicas with the longest leading runs of blocks, and how many; longest first.

        `draw` in [0, 1) says where to begin among those that hold the same: thousands may share the first
        blocks, and not all gateways should see the same ones.
        """
        found: dict[int, int] = {}
        seen: set[int] = set()  # slots: a replica with a gap stands at many starts, and is one look
        walk, by_slot = self._walk, self._by_slot
        looks = _LOOKS * most
        for start in reversed(walk.starts):
            slots = walk.slots(start)
            first = int(draw * len(slots))
            for place in range(first, first + len(slots)):
                if looks == 0 or len(found) == most:
                    break
                slot = slots[place % len(slots)]
                if slot in seen:
                    continue
                seen.add(slot)
                holder = by_slot.get(slot)
                if holder is not None:
                    looks -= 1
                    num_blocks = walk.leading(holder.held)
                    if num_blocks:
                        found[holder.replica] = num_blocks
        return sorted(found.items(), key=itemgetter(1), reverse=True)

    def local(self, replica: int) -> int:
        """Leading blocks that this replica holds itself, without a gap."""
        holder = self._replicas.get(replica)
        return 0 if holder is None else self._walk.leading(holder.held)

    def in_store(self, start: int) -> int:
        """How many blocks from `start` on the store probably has, without a gap."""
        num_blocks = self._asked.get(start)
        if num_blocks is None:
            num_blocks = self._asked[start] = self._end_in_store(start) - start
        return num_blocks

    def _end_in_store(self, start: int) -> int:
        for first, end in self._spans:
            if first <= start < end:
                return end
        chain, hints, end = self._chain, self._hints, start
        while len(keys := chain.upto(end + STRIDE)) > end:
            end = hints.run(keys, end, self._now)
            if end < len(keys):
                break
        if end > start:
            self._spans.append((start, end))
        return end
