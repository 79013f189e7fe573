"""What the shared store probably has: keys that workers said went there or came from there.

Owns two sets, a young one and an old one. Nobody tells what a store evicted, so keys age: what nobody
spoke of or asked for during `keep_s` to twice that is forgotten, and there are never more than
`most_blocks`. A use makes a key young again, as a use prolongs the life of a block in the store
(kv/ttl.py). Keys hash the namespace, so blocks of all namespaces may lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


class StoreHints:
    """Keys by when they were last heard of. `now` never goes back."""

    def __init__(self, most_blocks: int, keep_s: float) -> None:
        self._most_young = max(1, most_blocks // 2)
        self._keep_s = keep_s
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._turned_s: float | None = None  # when the young ones were last declared old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: int) -> bool:
        return key in self._young or key in self._old

    def add(self, keys: Sequence[int], now: float) -> None:
        """The store has these."""
        self.age(now)
        for start in range(0, len(keys), self._most_young):
            piece = keys[start : start + self._most_young]
            if len(self._young) + len(piece) > self._most_young:
                self._turn(now)
            self._young.update(piece)
            self._old.difference_update(piece)

    def run(self, keys: Sequence[int], start: int, now: float) -> int:
        """Where the run of keys from `start` on that it has ends: a use of each of them."""
        young, old = self._young, self._old
        end = start + len(list(takewhile(young.__contains__, keys[start:])))  # nearly always all there is
        aged: list[int] = []
        while end < len(keys):
            key = keys[end]
            if key not in young:
                if key not in old:
                    break
                aged.append(key)
            end += 1
        if aged:
            self.add(aged, now)
        return end

    def discard(self, keys: Sequence[int]) -> None:
        """The store was seen not to have these."""
        self._young.difference_update(keys)
        self._old.difference_update(keys)

    def age(self, now: float) -> None:
        """Forget what is too old."""
        if self._turned_s is None:
            self._turned_s = now
        while now - self._turned_s >= self._keep_s and (self._young or self._old):
            self._turn(self._turned_s + self._keep_s)
        if not self._young and not self._old:
            self._turned_s = now

    def _turn(self, now: float) -> None:
        self._old, self._young = self._young, set()
        self._turned_s = now
