"""Routing policies to compare with, and the choice among all by name.

None of them looks at what of a prompt is where, except that a session stays with its replica. All count
work that was sent since the last report, and a replica's weight. Round robin remembers its turn,
the others nothing. All must be given every replica: the least loaded of a few is not the least loaded, and a
session's replica would be another one each time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from blake3 import blake3

from antiphon.router.cost import LeastCost
from antiphon.router.policy import Ask, Overlap, Policy, Reason, ReplicaState, Route, pick_of

_SHARE_OVER = 1.25  # of the mean load: a session's replica is left above that, and
_NUM_OVER = 4  # so many sequences above the mean: where there is little load, one more is no reason
_LEAST_WEIGHT = 0.001


class PolicyName(enum.StrEnum):
    """The policies there are."""

    COST = "cost"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    SESSION = "session"

    @property
    def compares_all(self) -> bool:
        """Whether it is only itself where it sees every replica: a choice costs more the more there are."""
        return self is not PolicyName.COST


def policy_named(name: PolicyName) -> Policy:
    """A policy of that name, new: what it remembers is its own."""
    kinds: dict[PolicyName, type[Policy]] = {
        PolicyName.COST: LeastCost,
        PolicyName.ROUND_ROBIN: RoundRobin,
        PolicyName.LEAST_LOADED: LeastLoaded,
        PolicyName.POWER_OF_TWO: PowerOfTwo,
        PolicyName.SESSION: Session,
    }
    return kinds[name]()


class RoundRobin:
    """One after the other, by weight: the replica that is furthest behind its share is next.

    Over any stretch each gets its share to within one request. Remembers one number for each replica seen.
    """

    def __init__(self) -> None:
        self._behind: dict[int, float] = {}

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        if not states:
            return None
        total = sum(_weight(state) for state in states)
        self._behind = {
            state.replica: self._behind.get(state.replica, 0.0) + _weight(state) / total for state in states
        }
        most = max(self._behind.values())
        next_ones = [i for i, s in enumerate(states) if self._behind[s.replica] > most - _ALIKE]
        taken = next_ones[pick_of(len(next_ones), draw)]
        self._behind[states[taken].replica] -= 1.0
        return _route(ask, states, overlaps, taken, Reason.ROUND_ROBIN)


class LeastLoaded:
    """The fewest sequences, by weight; ties by lot."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        if not states:
            return None
        loads = [_load(state) for state in states]
        least = min(loads)
        best = [index for index, load in enumerate(loads) if load <= least]
        taken = best[pick_of(len(best), draw)]
        return _route(ask, states, overlaps, taken, Reason.LEAST_LOADED)


class PowerOfTwo:
    """The less loaded of two drawn by lot. One draw serves both: its fine digits are as random."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        if not states:
            return None
        if len(states) == 1:
            return _route(ask, states, overlaps, 0, Reason.ONLY_ONE)
        first = pick_of(len(states), draw)
        rest = draw * len(states) - first
        second = (first + 1 + pick_of(len(states) - 1, rest)) % len(states)
        taken = first if _load(states[first]) <= _load(states[second]) else second
        return _route(ask, states, overlaps, taken, Reason.POWER_OF_TWO)


class Session:
    """A session's replica is the first of its own order of all replicas that has room.

    The order is a weighted rendezvous hash: when a replica comes or goes, only its own sessions move.
    Without a session the least loaded one is taken.
    """

    def __init__(self) -> None:
        self._fallback = LeastLoaded()

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        if not states or not ask.session:
            return self._fallback.choose(ask, states, overlaps, draw)
        mean = sum(state.sequences for state in states) / sum(_weight(state) for state in states)
        scores = [_score(ask.session, state) for state in states]
        order = sorted(range(len(states)), key=scores.__getitem__, reverse=True)
        for index in order:
            share = mean * _weight(states[index])
            if states[index].sequences + 1 <= max(_SHARE_OVER * share, share + _NUM_OVER):
                reason = Reason.SESSION if index == order[0] else Reason.SESSION_FULL
                return _route(ask, states, overlaps, index, reason)
        raise AssertionError("all replicas are above their mean")


_ALIKE = 1e-9


def _score(session: bytes, state: ReplicaState) -> float:
    """Weighted rendezvous: the replica with the highest score has this session."""
    digest = blake3(session, key=_KEY).update(state.replica.to_bytes(8, "big", signed=True)).digest(8)
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64  # in (0, 1)
    return -_weight(state) / math.log(min(share, 1 - 2**-53))


_KEY = blake3(b"antiphon session to replica").digest()


def _weight(state: ReplicaState) -> float:
    return max(state.weight, _LEAST_WEIGHT)


def _load(state: ReplicaState) -> float:
    """Sequences for each unit of weight, this one included."""
    return (state.sequences + 1) / _weight(state)


def _route(
    ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], taken: int, reason: Reason
) -> Route:
    """Counts no help from the store: what is dispatched is then rather too much than too little."""
    num_uncached = max(ask.num_tokens - overlaps[taken].local_blocks * ask.block_tokens, 1)
    only = len(states) == 1
    return Route(states[taken].replica, Reason.ONLY_ONE if only else reason, (), num_uncached)
