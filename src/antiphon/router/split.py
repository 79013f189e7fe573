"""Whether a prompt is computed on one worker and answered on another. Pure: plain data in, plain data out.

Owns the comparison (docs/disaggregation.md explains it) and what roles mean for a choice. Seconds are
cost.py's, with one term more on both sides: every token computed on a worker makes the answers that run
there wait.

    whole(r)    = cost(r) + harm(r)
    split(p, d) = cost of the prompt at p + its last blocks' way to the store
                + max(0, wait(d) - that) + fetch and tail at d + answer at d + harm(p) + harm(d)

Invariants: a prompt is split only over a store that both workers say they reach, within one namespace,
from a worker whose role is prefill to one whose role is not; only where measured rates say that it is
cheaper by `SAFETY`; where answers would be made to wait, longer prompts are split no less often. There
is no least length: short prompts are not worth the way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from antiphon.core.generation import Role, WorkerRates
from antiphon.core.wait import ANSWER_TOKENS
from antiphon.router.cost import ANSWER_WEIGHT, MAX_SEQUENCES, STEP_S, Cost, cost, peer_rates
from antiphon.router.policy import Ask, Overlap, ReplicaState

SAFETY = 1.1  # estimates are not better than this
LAST_BLOCKS = 8  # of a prompt, full at its last step: what is written before they count as told
WRITE_SHARE = 0.5  # blocks written a second for one fetched (bench kv-wire)

BUSY_SHARE = 0.75  # of its slots that a decode worker is to have taken

_LEAST_RATE = 0.1
_LEAST_STEP_S, _MOST_STEP_S = 1e-5, 60.0  # others are taken for not known
_LEAST_WEIGHT = 0.001


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica, what of the prompt it has, and what it is for."""

    state: ReplicaState
    overlap: Overlap
    role: Role
    namespace: str

    @property
    def reaches_store(self) -> bool:
        """Workers whose store is away, or who have none, say a rate of 0."""
        rates = self.state.rates  # NaN counts as away
        is_measured = rates.store_rtt_s >= 0 and rates.import_s_per_block >= 0
        return is_measured and rates.store_blocks_per_s > _LEAST_RATE

    @property
    def acting_role(self) -> Role:
        """Without a store a role means nothing."""
        return self.role if self.reaches_store else Role.BOTH


class SplitReason(enum.StrEnum):
    """Why a prompt is split, or is not."""

    CHEAPER = "split"
    NOT_CHEAPER = "not_cheaper"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_STORE = "no_store"  # no pair of workers reaches one store and knows its rates
    TOO_SHORT = "too_short"  # not one full block that the other worker could take over


class Plan(msgspec.Struct, frozen=True):
    """One worker, the policy's to choose (`prefill` and `decode` None), or two.

    `prefill_s`: when the prompt is expected to be computed there, from now.
    """

    reason: SplitReason
    whole_s: float
    split_s: float | None = None  # None: it could not be
    prefill: int | None = None
    decode: int | None = None
    prefill_s: float = 0.0

    @property
    def is_split(self) -> bool:
        return self.prefill is not None


class _Lead(NamedTuple):
    """A prefill worker's part. `computed_s`: to its last block; `total_s`: until that is in the store."""

    replica: int
    computed_s: float
    total_s: float
    harm_s: float


class _Pair(NamedTuple):
    """Two workers, the cheaper the smaller."""

    total_s: float
    prefill: int
    decode: int
    computed_s: float


def plan(ask: Ask, candidates: Sequence[Candidate]) -> Plan:
    """The better of one worker and two. There is at least one candidate."""
    peers = peer_rates([c.state for c in candidates])
    whole_s = min(_whole_s(ask, c, peers) for c in takers(ask, candidates))
    leads = [c for c in candidates if c.role is Role.PREFILL]
    if not leads:
        return Plan(SplitReason.NO_PREFILL_WORKER, whole_s)
    if ask.num_tokens <= ask.block_tokens:
        return Plan(SplitReason.TOO_SHORT, whole_s)
    families = [[c for c in candidates if c.namespace == name] for name in {c.namespace for c in leads}]
    pairs = [pair for family in families if (pair := _best_pair(ask, family)) is not None]
    if not pairs:
        return Plan(SplitReason.NO_STORE, whole_s)
    best = min(pairs)
    if best.total_s * SAFETY >= whole_s:
        return Plan(SplitReason.NOT_CHEAPER, whole_s, best.total_s if math.isfinite(best.total_s) else None)
    return Plan(SplitReason.CHEAPER, whole_s, best.total_s, best.prefill, best.decode, best.computed_s)


def takers(ask: Ask, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Who may take this prompt whole.

    Prefill workers only where there is nobody else. Decode workers where that costs less than at any
    worker that is for both, a decode worker's answers counting in full; or where there is none. A worker
    whose store is away can neither hand prompts over nor take them: it is for both then.
    """
    general = [c for c in candidates if c.acting_role is Role.BOTH]
    decoders = [c for c in candidates if c.acting_role is Role.DECODE]
    if not general or not decoders:
        return general or decoders or list(candidates)
    peers = peer_rates([c.state for c in candidates])
    least_s = min(_whole_s(ask, c, peers) for c in general)
    return general + [c for c in decoders if _whole_s(ask, c, peers) < least_s]


def _whole_s(ask: Ask, candidate: Candidate, peers: WorkerRates) -> float:
    state = candidate.state
    here = cost(ask, state, candidate.overlap, peers)
    return here.total_s + _harm_s(candidate, here, ask.num_tokens, peers)


def _best_pair(ask: Ask, family: Sequence[Candidate]) -> _Pair | None:
    """The best two of one namespace, None where no store joins them."""
    joined = [c for c in family if c.reaches_store]
    if not any(c.state.rates.prefill_tokens_per_s > _LEAST_RATE for c in family):
        return None
    peers = peer_rates([c.state for c in family])
    leads = [_lead(ask, c, peers) for c in joined if c.role is Role.PREFILL]
    if not leads:
        return None
    lead = min(leads, key=lambda one: one.total_s + one.harm_s)
    pairs = [
        _Pair(_total_s(ask, c, lead, peers), lead.replica, c.state.replica, lead.computed_s)
        for c in joined
        if c.role is not Role.PREFILL
    ]
    return min(pairs, default=None)


def _lead(ask: Ask, candidate: Candidate, peers: WorkerRates) -> _Lead:
    """The prompt at a prefill worker: queue, computing, the last blocks' way to the store."""
    rates = candidate.state.rates
    here = cost(ask, candidate.state, candidate.overlap, peers)
    computed_s = here.wait_s + here.prefill_s
    written_s = rates.store_rtt_s + LAST_BLOCKS / (WRITE_SHARE * rates.store_blocks_per_s)
    total_s = computed_s + written_s + here.pressure_s
    harm_s = _harm_s(candidate, here, ask.num_tokens, peers)
    return _Lead(candidate.state.replica, computed_s, total_s, harm_s)


def _total_s(ask: Ask, candidate: Candidate, lead: _Lead, peers: WorkerRates) -> float:
    """Seconds of the split with this one answering; infinite where it would rather compute than fetch."""
    num_blocks = (ask.num_tokens - 1) // ask.block_tokens
    local = min(candidate.overlap.local_blocks, num_blocks)
    overlap = Overlap(local, num_blocks - local)
    here = cost(ask, candidate.state, overlap, peers)
    if not here.uses_store:
        return math.inf
    import_s = overlap.store_blocks * candidate.state.rates.import_s_per_block
    harm_s = _harm_s(candidate, here, ask.num_tokens, peers)
    harm_s += ANSWER_WEIGHT * candidate.state.running * import_s
    waits_s = max(0.0, here.wait_s - lead.total_s)
    return lead.total_s + lead.harm_s + waits_s + here.prefill_s + here.answer_s + here.pressure_s + harm_s


def _arrivals_per_s(state: ReplicaState, peers: WorkerRates) -> float:
    """Answers that begin at a decode worker as busy as it should be: they wait half of a prompt's time."""
    steps_s = (state.rates.step_s, peers.step_s)
    step_s = next(
        (seconds for seconds in steps_s if _LEAST_STEP_S < seconds < _MOST_STEP_S), STEP_S
    )  # NaN is none
    return BUSY_SHARE * (state.max_sequences or MAX_SEQUENCES) / (ANSWER_TOKENS * step_s)


def _harm_s(candidate: Candidate, here: Cost, num_tokens: int, peers: WorkerRates) -> float:
    """What the answers running there lose while the prompt is computed, as seconds before a first token."""
    state = candidate.state
    rates = (state.rates.prefill_tokens_per_s, peers.prefill_tokens_per_s)
    tokens_per_s = next((rate for rate in rates if rate >= _LEAST_RATE), _LEAST_RATE)  # NaN is none
    computed_s = min(here.num_uncached, num_tokens) / (tokens_per_s * max(state.weight, _LEAST_WEIGHT))
    if candidate.acting_role is Role.DECODE:
        return computed_s * (max(state.running, 1) + _arrivals_per_s(state, peers) * computed_s / 2)
    return ANSWER_WEIGHT * state.running * computed_s
