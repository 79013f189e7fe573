"""How much more may go to a worker now, by its last report and what was sent since. Pure.

    sequences   max_sequences - those that are there
    prefill     0.1 s of its measured rate - prompt tokens still to be computed
    KV          tokens that fit into its free and cached blocks - those sent since the report

The part of a second keeps its engine from idling until the next report, which comes with each step. No
sequence waits there for another's end: a place that is empty for a step costs little, and whoever waited
there would wait behind all that came before, whosever they are. A worker with nothing to do takes anything:
what does not fit is its to refuse. A request so long that it would have to wait for a nearly empty worker
goes when a quarter of the blocks is free, and waits there: else all others would wait with it. A room is
counted down by what is let in, wherever that goes then: the choice among workers may prefer a fuller one that
has the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from antiphon.router.cost import MAX_SEQUENCES, PREFILL_TOKENS_PER_S
from antiphon.router.lane import Ticket
from antiphon.router.policy import ReplicaState

PREFILL_BACKLOG_S = 0.1
_LONG = 0.25  # of a worker's blocks


@dataclass(slots=True)
class Room:
    """What may still be let in."""

    sequences: int
    prefill_tokens: float = math.inf
    kv_tokens: float = math.inf
    most_kv_tokens: float = math.inf  # that must be free for one request, however long it is
    is_idle: bool = False

    def fits(self, ticket: Ticket) -> bool:
        """Whether it may go. Of many sequences, room for the first is enough: the rest wait there."""
        if self.is_idle:
            return True
        has_kv = self.kv_tokens >= min(ticket.num_tokens, self.most_kv_tokens)
        return self.sequences > 0 and self.prefill_tokens > 0 and has_kv

    def take(self, ticket: Ticket) -> None:
        """It goes."""
        self.is_idle = False
        self.sequences -= ticket.num_sequences
        self.prefill_tokens -= ticket.num_prompt_tokens
        self.kv_tokens -= ticket.num_tokens


def room_of(state: ReplicaState, block_tokens: int) -> Room:
    """The room at a worker."""
    most = state.max_sequences or MAX_SEQUENCES
    num_sequences = state.sequences
    rate = state.rates.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
    num_waiting = state.waiting_tokens + state.dispatched_tokens
    is_known = state.num_blocks > 0
    kv_tokens = state.free_blocks * block_tokens - state.dispatched_tokens
    return Room(
        sequences=most - num_sequences,
        prefill_tokens=max(PREFILL_BACKLOG_S * rate, 1.0) - num_waiting,
        kv_tokens=kv_tokens if is_known else math.inf,
        most_kv_tokens=_LONG * state.num_blocks * block_tokens if is_known else math.inf,
        is_idle=num_sequences == 0,
    )
