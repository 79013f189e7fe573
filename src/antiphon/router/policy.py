"""What a routing policy is given and what it answers: plain data, so that the simulator runs the same rule.

Owns the terms: a replica as one gateway sees it, a request as the choice sees it, what of the prompt is
already there, and the route with its reason. Invariants: nothing here knows a link, a clock or Redis;
chance comes in as a draw. The rule itself is cost.py's, others to compare it with are in rivals.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

import msgspec

from antiphon.core.generation import WorkerRates


class ReplicaState(msgspec.Struct, frozen=True, gc=False):
    """A replica as one gateway sees it: its last report, and what was sent since.

    `waiting_tokens` is prompt still to be computed, of running sequences too. `dispatched` sequences and
    `dispatched_tokens` (a route's `num_uncached`) were sent since the report, so it cannot know them;
    `own` are this gateway's open ones, which a report that left too early misses. `free_blocks` are
    those a new sequence may take, of which `cached_blocks` hold what is then pushed out. `max_sequences`
    or `num_blocks` 0: not known. `weight` multiplies its speed.
    """

    replica: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    dispatched: int = 0
    dispatched_tokens: int = 0
    own: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    max_sequences: int = 0
    rates: WorkerRates = WorkerRates()
    weight: float = 1.0
    cached_blocks: int = 0

    @property
    def sequences(self) -> int:
        """The best lower bound of what is there."""
        return max(self.running + self.waiting + self.dispatched, self.own)


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A request as the choice sees it. `num_answer_tokens` is the most it may answer, 0: not known.

    `session` is whatever stays the same over a conversation; empty: there is nothing.
    """

    num_tokens: int
    block_tokens: int
    num_answer_tokens: int = 0
    session: bytes = b""


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt that need no computing: the replica's own, then what the store can add."""

    local_blocks: int = 0
    store_blocks: int = 0


NO_OVERLAP = Overlap()


class Reason(enum.StrEnum):
    """Why a replica was taken."""

    ONLY_ONE = "only_one"  # there was no other
    PREFIX = "prefix"  # nobody has more of the prompt, some have less
    STORE = "store"  # others have more of the prompt, but the store supplies it
    SPILL = "spill"  # others have more of the prompt, but are too busy
    LEAST_COST = "least_cost"  # all have as much of the prompt; it is the least busy or the fastest
    RANDOM_TIE = "random_tie"  # the same, and others were as good: chosen by lot
    SPREAD = "spread"  # others have more of the prompt and no room: by lot, that there be more holders
    SESSION = "session"  # the session's replica
    SESSION_FULL = "session_full"  # the session's replica has too much to do: its next one
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"


class Route(msgspec.Struct, frozen=True):
    """The replica taken, why, and what every candidate would have cost, in seconds (rivals: nothing).

    `num_uncached` prompt tokens are expected to be computed there: what to count as dispatched.
    """

    replica: int
    reason: Reason
    costs: tuple[tuple[int, float], ...] = ()
    num_uncached: int = 0

    def text(self, name_of: Callable[[int], str]) -> str:
        """For a header or a log line: `w3 prefix 0.412; w7 0.930, w1 1.250`: then the next best."""
        taken = f"{name_of(self.replica)} {self.reason}"
        seconds = dict(self.costs).get(self.replica)
        if seconds is None:
            return taken
        best = sorted(self.costs, key=itemgetter(1))[: _MOST_NAMED + 1]
        others = [f"{name_of(r)} {other_s:.3f}" for r, other_s in best if r != self.replica][:_MOST_NAMED]
        return f"{taken} {seconds:.3f}" + ("; " if others else "") + ", ".join(others)


_MOST_NAMED = 3


class Policy(Protocol):
    """A rule that chooses. `overlaps` are the states' in their order; `draw` in [0, 1) settles ties."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        ...


def pick_of(number: int, draw: float) -> int:
    """An index below `number`, even over draws in [0, 1)."""
    return min(int(draw * number), number - 1)
