"""Which replicas hold a block: slots by key, compact, made for walking chains.

Owns the table alone. A block with one holder costs an integer, more are a tuple; blocks that were told
together share one tuple, so that neighbours with the same holders are seen to be neighbours by comparing
two references. Slots are small integers that are never given out twice: what a replica that is gone left
behind may be cleaned up later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

Holders: TypeAlias = int | tuple[int, ...]  # one slot, or several

STRIDE = 64  # keys asked for at a time


class KeyChain(Protocol):
    """The keys of a chain of blocks, computed as far as they are asked for."""

    def upto(self, count: int) -> list[int]:
        """The keys from the first one on: at least `count`, or all there are."""
        ...


class Run(NamedTuple):
    """Neighbours in a chain that the same slots hold, from `start` to the next run; `key` is the first."""

    start: int
    key: int
    holders: Holders

    @property
    def slots(self) -> tuple[int, ...]:
        return self.holders if isinstance(self.holders, tuple) else (self.holders,)


class HolderTable:
    """Slots by key."""

    def __init__(self) -> None:
        self._holders: dict[int, Holders] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, slot: int, keys: Iterable[int]) -> None:
        """The slot holds these too. It held none of them before."""
        table = self._holders
        before: Holders | None = None
        after: Holders = slot
        for key in keys:
            holders = table.get(key)
            if holders is None:
                table[key] = slot
                continue
            if holders is not before:
                before = holders
                after = (*holders, slot) if isinstance(holders, tuple) else (holders, slot)
            table[key] = after

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """The slot, which held all of these, holds them no longer."""
        table = self._holders
        before: Holders | None = None
        after: Holders = slot
        for key in keys:
            holders = table[key]
            if not isinstance(holders, tuple):
                del table[key]
                continue
            if holders is not before:
                before = holders
                left = tuple(other for other in holders if other != slot)
                after = left if len(left) > 1 else left[0]
            table[key] = after

    def walk(self, chain: KeyChain) -> tuple[list[Run], int]:
        """The runs from the first block on, and where they end: at the first block that nobody holds."""
        runs: list[Run] = []
        get = self._holders.get
        before: Holders = -1  # nobody's slot
        start = 0
        while len(keys := chain.upto(start + STRIDE)) > start:
            found = list(map(get, keys[start : start + STRIDE]))
            if found.count(before) < len(found):  # else the run goes on; a third of the loop's time
                for depth, holders in enumerate(found, start):
                    if holders is not before:
                        if holders is None:
                            return runs, depth
                        runs.append(Run(depth, keys[depth], holders))
                        before = holders
            start += len(found)
        return runs, start
