"""Names by a number, the least first: every change costs the logarithm of how many there are. Pure.

Invariants: among equal numbers the one that got its number first is the least; the heap holds no more than
twice what counts, and `_SLACK`.
"""

from __future__ import annotations

import heapq
import itertools

_SLACK = 64


class Ranking:
    """Numbers may go up and down."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._heap: list[
            tuple[float, int, str]
        ] = []  # an entry whose number is not the name's any more is dead
        self._turns = itertools.count()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, name: str, value: float) -> None:
        """This is its number now."""
        if self._values.get(name) == value:
            return
        self._values[name] = value
        heapq.heappush(self._heap, (value, next(self._turns), name))
        if len(self._heap) > 2 * len(self._values) + _SLACK:
            self._rebuild()

    def drop(self, name: str) -> None:
        """Forget it. Nothing happens where it is not known."""
        self._values.pop(name, None)

    def least(self) -> str | None:
        """Who has the least number; None where there is nobody."""
        while self._heap and self._is_dead(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _is_dead(self, entry: tuple[float, int, str]) -> bool:
        return self._values.get(entry[2]) != entry[0]

    def _rebuild(self) -> None:
        alive: dict[str, tuple[float, int, str]] = {}
        for entry in sorted(entry for entry in self._heap if not self._is_dead(entry)):
            alive.setdefault(entry[2], entry)
        self._heap = list(alive.values())  # sorted, so it is a heap
