"""Two sides measured in turns, and ratios as medians over the pairs.

`ours` and `peer` take turns at going first, so that a drift of the machine hits both alike.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bench.load import median

M = TypeVar("M")


@dataclass(slots=True)
class Pairs(Generic[M]):
    """Measurements of both sides, pair by pair."""

    ours: list[M] = field(default_factory=list)
    peer: list[M] = field(default_factory=list)

    def ratio(self, of: Callable[[M], float]) -> float:
        """Median over the pairs of ours ÷ peer's."""
        return median([of(a) / of(b) for a, b in zip(self.ours, self.peer, strict=True) if of(b)])


def median_of(measured: Sequence[M], of: Callable[[M], float]) -> float:
    """The median of one number over one side's measurements."""
    return median([of(m) for m in measured])


async def in_pairs(
    num_pairs: int, ours: Callable[[int], Awaitable[M]], peer: Callable[[int], Awaitable[M]]
) -> Pairs[M]:
    """Measure both sides `num_pairs` times. Both get the pair's number, as their seed."""
    pairs: Pairs[M] = Pairs()
    for number in range(num_pairs):
        progress(f"pair {number + 1} of {num_pairs}")
        if number % 2 == 0:
            pairs.ours.append(await ours(number))
            pairs.peer.append(await peer(number))
        else:
            pairs.peer.append(await peer(number))
            pairs.ours.append(await ours(number))
    return pairs


def progress(text: str) -> None:
    """One line on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
