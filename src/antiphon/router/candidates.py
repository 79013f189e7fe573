"""Few replicas out of thousands that are worth a closer look.

Owns the states of the replicas that take work for one model, filed by how soon a usual request would be
done there: buckets 12 % apart, so that a report which changes little moves nothing and a change of
bucket costs the same however many replicas there are. Invariants: every replica is in one bucket;
what `few` yields is bounded (unless all are asked for), and where there are no more replicas than that
it is all of them.
Does not choose: that is the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from antiphon.core.generation import WorkerRates
from antiphon.router.cost import PREFILL_TOKENS_PER_S, STEP_S, cost
from antiphon.router.policy import NO_OVERLAP, Ask, ReplicaState, pick_of

NUM_HOLDERS = 8  # of the prompt's beginning
NUM_LEAST = 5  # that would be done soonest with a usual request
NUM_RANDOM = 3  # so that a replica which reports nonsense, or knows no rates, is not left out for ever
NUM_FEW = NUM_HOLDERS + NUM_LEAST + NUM_RANDOM

_USUAL = Ask(num_tokens=1024, block_tokens=16)
_GUESS = WorkerRates(PREFILL_TOKENS_PER_S, STEP_S)
_PER_OCTAVE = 6
_LEAST_S = 0.001
_NUM_BUCKETS = 32 * _PER_OCTAVE


class Candidates:
    """The replicas of one model. `draw` in [0, 1) is asked for what is left to chance.

    `yields_all`: for a policy that must compare all of them, however many there are.
    """

    def __init__(self, draw: Callable[[], float], *, yields_all: bool = False) -> None:
        self._draw = draw
        self._yields_all = yields_all
        self._states: dict[int, ReplicaState] = {}
        self._all = _Bag()
        self._buckets = [_Bag() for _ in range(_NUM_BUCKETS)]
        self._bucket_of: dict[int, int] = {}
        self._lowest = 0  # no bucket before it holds anything

    def __len__(self) -> int:
        return len(self._states)

    def update(self, state: ReplicaState) -> None:
        """Take in what is known of a replica now: at its reports, and when work is sent there."""
        replica = state.replica
        bucket = _bucket(state)
        old = self._bucket_of.get(replica)
        self._states[replica] = state
        if bucket == old:
            return
        if old is None:
            self._all.add(replica)
        else:
            self._buckets[old].remove(replica)
        self._buckets[bucket].add(replica)
        self._bucket_of[replica] = bucket
        self._lowest = min(self._lowest, bucket)

    def remove(self, replica: int) -> None:
        """It takes no work now. Nothing happens where it is not known."""
        bucket = self._bucket_of.pop(replica, None)
        if bucket is not None:
            del self._states[replica]
            self._all.remove(replica)
            self._buckets[bucket].remove(replica)

    def from_least_busy(self) -> Iterator[ReplicaState]:
        """All of them, about the least busy first. Must not be changed meanwhile."""
        return (self._states[replica] for replica in self._least_busy())

    def few(self, holders: Sequence[int], avoid: Collection[int] = ()) -> list[ReplicaState]:
        """To choose from: at most `NUM_FEW` of `holders` (best first), of the least busy, and some by lot.

        None of `avoid`.
        """
        states = self._states
        if len(states) <= NUM_FEW or self._yields_all:
            return [state for replica, state in states.items() if replica not in avoid]
        taken = dict.fromkeys(r for r in holders[:NUM_HOLDERS] if r in states and r not in avoid)
        self._add(taken, self._least_busy(), len(taken) + NUM_LEAST, avoid)
        self._add(taken, self._all.from_anywhere(self._draw()), len(taken) + NUM_RANDOM, avoid)
        return [states[replica] for replica in taken]

    def _add(self, taken: dict[int, None], source: Iterator[int], most: int, avoid: Collection[int]) -> None:
        for replica in source:
            if len(taken) >= most:
                return
            if replica not in avoid:
                taken[replica] = None

    def _least_busy(self) -> Iterator[int]:
        """Bucket by bucket, each from a place drawn by lot: gateways that see the same take others."""
        buckets = self._buckets
        while self._lowest < _NUM_BUCKETS - 1 and not buckets[self._lowest].items:
            self._lowest += 1
        for bucket in range(self._lowest, _NUM_BUCKETS):
            if buckets[bucket].items:
                yield from buckets[bucket].from_anywhere(self._draw())


class _Bag:
    """Items in no order: adding, removing and taking from anywhere cost the same at any size."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        self.items: list[int] = []
        self._places: dict[int, int] = {}

    def add(self, item: int) -> None:
        self._places[item] = len(self.items)
        self.items.append(item)

    def remove(self, item: int) -> None:
        place = self._places.pop(item)
        last = self.items.pop()
        if last != item:
            self.items[place] = last
            self._places[last] = place

    def from_anywhere(self, draw: float) -> Iterator[int]:
        """All items, beginning at a place by lot. Must not be changed meanwhile."""
        items = self.items
        if items:
            start = pick_of(len(items), draw)
            for place in range(start, start + len(items)):
                yield items[place % len(items)]


def _bucket(state: ReplicaState) -> int:
    seconds = cost(_USUAL, state, NO_OVERLAP, _GUESS).total_s
    return min(max(int(_PER_OCTAVE * math.log2(max(seconds, _LEAST_S) / _LEAST_S)), 0), _NUM_BUCKETS - 1)
