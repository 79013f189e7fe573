"""Which replicas hold a block: slots by key, compact, made for walking chains.

Owns the table alone. A block with one holder costs an integer, more are a tuple; blocks that were told
together share one tuple, so that neighbours with the same holders are seen to be neighbours by comparing
two references. Slots are small integers that are never given out twice: what a replica that is gone left
behind may be cleaned up later.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol, TypeAlias

Holders: TypeAlias = int | tuple[int, ...]  # one slot, or several

STRIDE = 64  # keys asked for at a time
_FAR = 128  # known blocks, from which on so many are asked for


class KeyChain(Protocol):
    """The keys of a chain of blocks, computed as far as they are asked for."""

    def upto(self, count: int) -> list[int]:
        """The keys from the first one on: at least `count`, or all there are."""
        ...


class Walk:
    """The blocks of a chain from the first one to the first that nobody holds, and who holds each.

    `starts`: where the holders are others than those of the block before; the first one is 0.
    """

    __slots__ = ("_holders", "_keys", "starts")

    def __init__(self, keys: list[int], holders: list[Holders]) -> None:
        """`keys` may go on past the holders."""
        self._keys = keys
        self._holders = holders
        self.starts = _starts(holders)

    @property
    def end(self) -> int:
        """How many blocks somebody holds, from the first one on."""
        return len(self._holders)

    def slots(self, block: int) -> tuple[int, ...]:
        """Who holds this block."""
        holders = self._holders[block]
        return holders if isinstance(holders, tuple) else (holders,)

    def leading(self, held: Container[int]) -> int:
        """How many of the first blocks are among these, all those of one slot: it has the blocks from one
        start to the next, or none of them.
        """
        keys = self._keys
        for start in self.starts:
            if keys[start] not in held:
                return start
        return len(self._holders)


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

    def walk(self, chain: KeyChain) -> Walk:
        """As far as somebody holds the next block; the chain is hashed no further than a stride past that.

        Every block is looked up, since holders evict from the middle too; what is done for each is done in C.
        Of what is known far, more is likely to be known: strides are longer there.
        """
        holders: list[Holders] = []
        known = self._holders.__getitem__
        keys: list[int] = []
        try:
            stride = STRIDE
            while len(keys := chain.upto(len(holders) + stride)) > len(holders):
                holders.extend(map(known, keys[len(holders) :]))
                stride = STRIDE if len(holders) < _FAR else _FAR
        except KeyError:
            pass  # nobody holds it; those before it are in the list
        return Walk(keys, holders)


def _starts(holders: list[Holders]) -> list[int]:
    """Where others follow. Told by reference: to compare two tuples may take thousands of steps."""
    starts = []
    before: Holders = -1  # nobody's slot
    for first in range(0, len(holders), STRIDE):
        some = holders[first : first + STRIDE]
        if some[-1] is before and some.count(before) == len(some):
            continue  # as nearly always
        for block, each in enumerate(some, first):
            if each is not before:
                starts.append(block)
                before = each
    return starts
