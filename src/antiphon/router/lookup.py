"""What is known of one prompt's blocks at one moment: who holds how many of them, what the store can add.

Owns the answers to one walk along the chain (holders.py), made as they are asked for: the chain is hashed
and the store's hints are searched no further than that. To be used at once: what is taken in later may
not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from antiphon.router.holders import STRIDE, KeyChain, Run

_LOOKS = 2  # at so many holders for each one that is wanted: some have gaps


class Holder(Protocol):
    """A replica, and the keys that it holds."""

    @property
    def replica(self) -> int: ...

    @property
    def held(self) -> Mapping[int, int]: ...


class Lookup:
    """One chain's. `end`: the first block that no replica holds, and at the same time where `runs` end."""

    def __init__(
        self,
        chain: KeyChain,
        walked: tuple[list[Run], int],
        replicas: Mapping[int, Holder],
        by_slot: Mapping[int, Holder],
        store_run: Callable[[Sequence[int], int], int],
    ) -> None:
        self._chain = chain
        self._runs, self.end = walked
        self._replicas = replicas
        self._by_slot = by_slot
        self._store_run = store_run
        self._spans: list[tuple[int, int]] = []  # runs of blocks that the store has, as far as asked for

    def holders(self, most: int, draw: float) -> list[tuple[int, int]]:
        """At most so many replicas with the longest leading runs of blocks, and how many; longest first.

        `draw` in [0, 1) says where to begin among those that hold the same: thousands may share the first
        blocks, and not all gateways should see the same ones.
        """
        found: dict[int, int] = {}
        looks = _LOOKS * most
        for run in reversed(self._runs):
            slots = run.slots
            first = int(draw * len(slots))
            for place in range(len(slots)):
                if looks == 0 or len(found) == most:
                    break
                holder = self._by_slot.get(slots[(first + place) % len(slots)])
                if holder is not None and holder.replica not in found:
                    looks -= 1
                    num_blocks = self._local(holder)
                    if num_blocks:
                        found[holder.replica] = num_blocks
        return sorted(found.items(), key=lambda item: -item[1])

    def local(self, replica: int) -> int:
        """Leading blocks that this replica holds itself, without a gap."""
        holder = self._replicas.get(replica)
        return 0 if holder is None else self._local(holder)

    def in_store(self, start: int) -> int:
        """How many blocks from `start` on the store probably has, without a gap."""
        for first, end in self._spans:
            if first <= start < end:
                return end - start
        end = self._end_in_store(start)
        self._spans.append((start, end))
        return end - start

    def _local(self, holder: Holder) -> int:
        held = holder.held
        for run in self._runs:
            if run.key not in held:
                return run.start
        return self.end

    def _end_in_store(self, start: int) -> int:
        end = start
        while len(keys := self._chain.upto(end + STRIDE)) > end:
            end = self._store_run(keys, end)
            if end < len(keys):
                break
        return end
