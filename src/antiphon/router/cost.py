"""What a request costs on a replica, in seconds, and the policy that takes the least.

Owns the formula and its constants (docs/routing.md explains both):

    cost = wait + prefill + answer + pressure

and the one exception to it: a few requests leave a holder that has no room, so that there are more holders.

Invariants: finite for whatever a worker may report; never falls when a replica gets busier, never rises
when more of the prompt is there or a rate improves; a store counts only where it beats computing.
Pure: no clock, no chance of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from antiphon.core.generation import WorkerRates
from antiphon.core.wait import ANSWER_TOKENS, wait_s
from antiphon.router.policy import Ask, Overlap, Reason, ReplicaState, Route, pick_of

PREFILL_TOKENS_PER_S = 2000.0  # where nobody has measured: a small model on a CPU, or a large one on a GPU
STEP_S = 0.02
MAX_SEQUENCES = 32
ANSWER_WEIGHT = 0.25  # a second of writing counts as so much of a second before the first token
PRESSURE_S = 0.15
REUSE_SHARE = 0.5  # of the blocks that are pushed out, those that would have been asked for again
MOST_USED = 0.98  # of the blocks, for the pressure: keeps it finite
TIE_SHARE = 0.03  # costs so near to the least are equal: rates are not measured better
TIE_S = 0.001
SPREAD_SHARE = 1 / 256  # of the requests that go to a holder without room

_LEAST_RATE = 0.1  # tokens or blocks a second; less is taken for not known
_MOST_S = 60.0  # for one step or one round trip; more is taken for not known
_LEAST_WEIGHT = 0.001
_MOST_WEIGHT = 1000.0


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds by cause, and the prompt tokens that would be computed."""

    wait_s: float
    prefill_s: float
    answer_s: float
    pressure_s: float
    num_uncached: int
    uses_store: bool

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.answer_s + self.pressure_s


def cost(ask: Ask, state: ReplicaState, overlap: Overlap, peers: WorkerRates) -> Cost:
    """What this request costs there. `peers` stand in for what the replica does not know of itself."""
    rates = state.rates
    weight = state.weight
    if not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
        weight = min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT)
    token_s = 1 / (weight * _rate(rates.prefill_tokens_per_s, peers.prefill_tokens_per_s))
    step_s = _seconds(rates.step_s, peers.step_s) / weight
    num_sequences = state.sequences
    fullness = num_sequences / (state.max_sequences or MAX_SEQUENCES)
    answer_tokens = min(ask.num_answer_tokens or ANSWER_TOKENS, ANSWER_TOKENS)
    prefill_s, num_uncached, uses_store = _prefill(ask, overlap, token_s, rates, peers)
    waits_s = wait_s(
        state.waiting_tokens + state.dispatched_tokens,
        num_sequences,
        state.max_sequences,
        token_s=token_s,
        step_s=step_s,
    )
    answer_s = ANSWER_WEIGHT * answer_tokens * step_s * (1 + fullness)
    pressure_s = _pressure_s(ask, state, answer_tokens) + _eviction_s(ask, state, overlap, token_s, peers)
    return Cost(waits_s, prefill_s, answer_s, pressure_s, num_uncached, uses_store)


def _prefill(
    ask: Ask, overlap: Overlap, token_s: float, rates: WorkerRates, peers: WorkerRates
) -> tuple[float, int, bool]:
    """Seconds to the last prompt token's step, the tokens computed in them, whether the store helps."""
    # The last token is always computed: its logits are the first answer token's.
    num_missing = max(ask.num_tokens - overlap.local_blocks * ask.block_tokens, 1)
    num_offered = overlap.store_blocks and min(overlap.store_blocks * ask.block_tokens, num_missing - 1)
    if num_offered > 0:
        rtt_s, block_s = _store(rates, peers)
        fetch_s = rtt_s + num_offered / ask.block_tokens * block_s
        if fetch_s < num_offered * token_s:
            num_computed = num_missing - num_offered
            return fetch_s + num_computed * token_s, num_computed, True
    return num_missing * token_s, num_missing, False


def _pressure_s(ask: Ask, state: ReplicaState, answer_tokens: int) -> float:
    if state.num_blocks <= 0:
        return 0.0
    num_tokens = ask.num_tokens + answer_tokens + state.dispatched_tokens
    num_left = state.free_blocks - num_tokens / ask.block_tokens
    used = 1 - num_left / state.num_blocks
    if used <= 0:
        return 0.0
    return PRESSURE_S * used / (1 - used) if used < MOST_USED else PRESSURE_S * MOST_USED / (1 - MOST_USED)


def _eviction_s(ask: Ask, state: ReplicaState, overlap: Overlap, token_s: float, peers: WorkerRates) -> float:
    """What the blocks that have to go are worth: the chance that they are missed, times their coming back."""
    num_empty = state.free_blocks - state.cached_blocks - state.dispatched_tokens / ask.block_tokens
    num_new = ask.num_tokens / ask.block_tokens - overlap.local_blocks
    num_out = num_new - num_empty if num_empty > 0 else num_new
    if num_out <= 0:
        return 0.0
    block_s = min(ask.block_tokens * token_s, _store(state.rates, peers)[1])
    return REUSE_SHARE * min(num_out, state.cached_blocks) * block_s


def _store(rates: WorkerRates, peers: WorkerRates) -> tuple[float, float]:
    """Seconds for a round trip and for each block. Nothing known of the store: it is of no use."""
    blocks_per_s = _rate(rates.store_blocks_per_s, peers.store_blocks_per_s)
    if blocks_per_s <= _LEAST_RATE:
        return _MOST_S, _MOST_S
    rtt_s = _seconds(rates.store_rtt_s, peers.store_rtt_s)
    return rtt_s, 1 / blocks_per_s + _seconds(rates.import_s_per_block, peers.import_s_per_block)


def _rate(known: float, stand_in: float) -> float:
    """Written so that NaN counts as not known."""
    return known if known > _LEAST_RATE else stand_in if stand_in > _LEAST_RATE else _LEAST_RATE


def _seconds(known: float, stand_in: float) -> float:
    return known if 0 < known < _MOST_S else stand_in if 0 < stand_in < _MOST_S else 0.0


class LeastCost:
    """The policy Antiphon routes by: the least cost, ties by lot."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        if not states:
            return None
        peers = peer_rates(states)
        costs = [cost(ask, state, overlap, peers) for state, overlap in zip(states, overlaps, strict=True)]
        totals = [c.total_s for c in costs]
        least_s = min(totals)
        near_s = least_s + max(TIE_S, TIE_SHARE * least_s)
        best = [index for index, total_s in enumerate(totals) if total_s <= near_s]
        taken = best[pick_of(len(best), draw)]
        reason = _reason(overlaps, best, taken, uses_store=costs[taken].uses_store)
        fine = draw * len(best) % 1  # the digits that this choice did not use
        if reason is Reason.PREFIX and fine < SPREAD_SHARE and _is_full(ask, states[taken]):
            taken, reason = _elsewhere(costs, overlaps, fine / SPREAD_SHARE), Reason.SPREAD
        return Route(
            states[taken].replica,
            reason,
            tuple(zip([state.replica for state in states], totals, strict=True)),
            costs[taken].num_uncached,
        )


def _is_full(ask: Ask, state: ReplicaState) -> bool:
    """Whether room for the prompt is made by pushing out what others may want."""
    num_empty = state.free_blocks - state.cached_blocks
    return state.cached_blocks > 0 and num_empty * ask.block_tokens < ask.num_tokens


def _elsewhere(costs: Sequence[Cost], overlaps: Sequence[Overlap], draw: float) -> int:
    """One of those who have less of the prompt, least busy, ties by lot."""
    most = max(overlap.local_blocks for overlap in overlaps)
    others = [index for index, overlap in enumerate(overlaps) if overlap.local_blocks < most]
    busy_s = [costs[index].total_s - costs[index].prefill_s for index in others]
    near_s = min(busy_s) * (1 + TIE_SHARE) + TIE_S
    idlest = [index for index, seconds in zip(others, busy_s, strict=True) if seconds <= near_s]
    return idlest[pick_of(len(idlest), draw)]


def peer_rates(states: Sequence[ReplicaState]) -> WorkerRates:
    """What to take for rates that a replica does not know: the middle of what the others do."""
    rates = [state.rates for state in states]
    for known in rates:
        if not (known.prefill_tokens_per_s and known.step_s and known.store_blocks_per_s):
            break
    else:
        return rates[0]  # nobody will ask
    return WorkerRates(
        prefill_tokens_per_s=_middle([r.prefill_tokens_per_s for r in rates]) or PREFILL_TOKENS_PER_S,
        step_s=_middle([r.step_s for r in rates]) or STEP_S,
        store_rtt_s=_middle([r.store_rtt_s for r in rates]),
        store_blocks_per_s=_middle([r.store_blocks_per_s for r in rates]),
        import_s_per_block=_middle([r.import_s_per_block for r in rates]),
    )


def _middle(values: Sequence[float]) -> float:
    known = sorted(value for value in values if 0 < value < math.inf)
    return known[len(known) // 2] if known else 0.0


def _reason(overlaps: Sequence[Overlap], best: Sequence[int], taken: int, *, uses_store: bool) -> Reason:
    if len(overlaps) == 1:
        return Reason.ONLY_ONE
    held = [overlap.local_blocks for overlap in overlaps]
    most = max(held)
    if len(best) > 1 and any(held[index] != held[taken] for index in best):
        return Reason.RANDOM_TIE
    if held[taken] < most:
        return Reason.STORE if uses_store else Reason.SPILL
    if most > min(held):
        return Reason.PREFIX
    return Reason.LEAST_COST if len(best) == 1 else Reason.RANDOM_TIE
