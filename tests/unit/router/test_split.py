"""One worker or two for a prompt: the comparison, and who may take what."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import Role, WorkerRates
from antiphon.router.policy import Ask, Overlap, ReplicaState
from antiphon.router.split import Candidate, Plan, SplitReason, plan, takers

RATES = WorkerRates(
    prefill_tokens_per_s=500.0,
    step_s=0.02,
    store_rtt_s=0.0005,
    store_blocks_per_s=2000.0,
    import_s_per_block=0.0002,
)
BLOCK = 32


def worker(
    replica: int,
    role: Role = Role.BOTH,
    *,
    local: int = 0,
    stored: int = 0,
    namespace: str = "n",
    **state: object,
) -> Candidate:
    values = {"rates": RATES, "max_sequences": 8} | state
    return Candidate(ReplicaState(replica, **values), Overlap(local, stored), role, namespace)


def ask(num_tokens: int) -> Ask:
    return Ask(num_tokens, BLOCK, 128)


def fleet(**decoding: object) -> list[Candidate]:
    """A prefill worker without work and a decode worker."""
    return [worker(0, Role.PREFILL), worker(1, Role.DECODE, **decoding)]


def test_a_long_cold_prompt_is_split_where_answers_would_wait() -> None:
    """Four running answers would stand by for 8 s; the plan names both workers and what both ways cost."""
    made = plan(ask(4000), fleet(running=4))
    assert (made.reason, made.prefill, made.decode) == (SplitReason.CHEAPER, 0, 1)
    assert made.split_s is not None
    assert made.split_s < made.whole_s / 3
    assert made.prefill_s == pytest.approx(8.0)


def test_a_short_prompt_is_not_split() -> None:
    """The way over the store costs more than computing it."""
    made = plan(ask(40), fleet(running=1))
    assert (made.reason, made.prefill, made.decode) == (SplitReason.NOT_CHEAPER, None, None)


@pytest.mark.parametrize("num_tokens", [1, BLOCK])
def test_without_a_full_block_there_is_nothing_to_hand_over(num_tokens: int) -> None:
    """The last token is always computed where the answer is."""
    assert plan(ask(num_tokens), fleet(running=4)).reason is SplitReason.TOO_SHORT


def test_a_warm_prompt_is_not_split() -> None:
    """Its length does not count, only what would be computed."""
    assert plan(ask(4000), fleet(running=4, local=124)).reason is SplitReason.NOT_CHEAPER
    assert plan(ask(4000), fleet(running=4, stored=124)).reason is SplitReason.NOT_CHEAPER


def test_an_idle_worker_for_both_takes_it_whole() -> None:
    """Nothing is gained by the way over the store."""
    assert plan(ask(4000), [worker(0, Role.PREFILL), worker(1)]).reason is SplitReason.NOT_CHEAPER


def test_busy_workers_for_both_have_their_prompts_computed_elsewhere() -> None:
    """Any worker that is not a prefill worker may answer."""
    made = plan(ask(4000), [worker(0, Role.PREFILL), worker(1, running=8), worker(2, running=6)])
    assert (made.prefill, made.decode) == (0, 2)


def test_an_idle_decode_worker_does_not_take_a_long_prompt_because_the_prefill_worker_is_busy() -> None:
    """Chats will come while it computes; a short prompt is over before they do."""
    busy, idle = worker(0, Role.PREFILL, waiting_tokens=4000), worker(1, Role.DECODE)
    assert plan(ask(4000), [busy, idle]).is_split
    assert not plan(ask(100), [busy, idle]).is_split


def test_a_prefill_worker_with_a_queue_is_passed() -> None:
    """The other prefill worker, or none."""
    busy = worker(0, Role.PREFILL, waiting_tokens=200_000)
    made = plan(
        ask(4000), [busy, worker(1, Role.PREFILL, waiting_tokens=100), worker(2, Role.DECODE, running=4)]
    )
    assert made.prefill == 1
    assert plan(ask(4000), [busy, worker(2, Role.DECODE, running=4)]).reason is SplitReason.NOT_CHEAPER


def test_what_the_prefill_worker_has_counts() -> None:
    """The one that holds half of the prompt computes the other half."""
    cold, warm = worker(0, Role.PREFILL), worker(1, Role.PREFILL, local=60)
    assert plan(ask(4000), [cold, warm, worker(2, Role.DECODE, running=4)]).prefill == 1


def test_roles_only_no_prefill_worker() -> None:
    """Workers for both do not compute for each other."""
    assert plan(ask(4000), [worker(0), worker(1, running=8)]).reason is SplitReason.NO_PREFILL_WORKER


@pytest.mark.parametrize("away", [0, 1])
def test_a_worker_without_its_store_takes_no_part(away: int) -> None:
    """Whoever of the two lost it; a third that has it takes the place."""
    lost = msgspec.structs.replace(RATES, store_blocks_per_s=0.0, store_rtt_s=0.0)
    both = fleet(running=4)
    state = msgspec.structs.replace(both[away].state, rates=lost, waiting_tokens=20_000)
    both[away] = msgspec.structs.replace(both[away], state=state)
    assert plan(ask(4000), both).reason is SplitReason.NO_STORE
    role = Role.PREFILL if away == 0 else Role.DECODE
    made = plan(ask(4000), [*both, worker(7, role, running=1)])
    assert (made.prefill, made.decode)[away] == 7


def test_a_slow_store_is_not_used() -> None:
    """Where fetching takes longer than computing nothing is split."""
    slow = msgspec.structs.replace(RATES, store_blocks_per_s=10.0)
    both = [worker(0, Role.PREFILL, rates=slow), worker(1, Role.DECODE, running=4, rates=slow)]
    assert not plan(ask(4000), both).is_split


def test_who_takes_a_prompt_whole() -> None:
    """Prefill workers where there is nobody else; decode workers as long as they are not made to wait."""
    prefill, decode, both = worker(0, Role.PREFILL), worker(1, Role.DECODE, running=4), worker(2, running=4)
    assert takers(ask(4000), [prefill, decode, both]) == [both]
    assert takers(ask(4000), [prefill, decode]) == [decode]
    assert takers(ask(4000), [prefill]) == [prefill]
    short = takers(ask(40), [prefill, worker(1, Role.DECODE), both])
    assert [c.state.replica for c in short] == [2, 1]


def test_without_a_store_roles_mean_nothing() -> None:
    """Nobody stands idle because Redis is away; who still reaches it keeps its role."""
    away = WorkerRates(prefill_tokens_per_s=500.0, step_s=0.02)
    prefill, decode = worker(0, Role.PREFILL, rates=away), worker(1, Role.DECODE, running=4, rates=away)
    assert takers(ask(4000), [prefill, decode]) == [prefill, decode]
    assert takers(ask(4000), [worker(0, Role.PREFILL), decode]) == [decode]


FLOATS = st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.sampled_from([math.nan, math.inf]))
ANY_RATES = st.one_of(st.just(RATES), st.builds(WorkerRates, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS))
ANY_WORKER = st.builds(
    Candidate,
    st.builds(
        ReplicaState,
        replica=st.integers(0, 10**6),
        running=st.integers(0, 64),
        waiting=st.integers(0, 64),
        waiting_tokens=st.integers(0, 10**6),
        free_blocks=st.integers(0, 1000),
        num_blocks=st.sampled_from([0, 1000]),
        max_sequences=st.sampled_from([0, 8]),
        rates=ANY_RATES,
    ),
    st.builds(Overlap, st.integers(0, 400), st.integers(0, 400)),
    st.sampled_from(Role),
    st.sampled_from(["one", "other"]),
)


@given(workers=st.lists(ANY_WORKER, min_size=1, max_size=6), num_tokens=st.integers(1, 10_000))
def test_a_plan_can_be_carried_out(workers: list[Candidate], num_tokens: int) -> None:
    """Whatever workers report: two different ones of one namespace, both with a store, in their roles."""
    workers = [
        msgspec.structs.replace(c, state=msgspec.structs.replace(c.state, replica=index))
        for index, c in enumerate(workers)
    ]
    made = plan(ask(num_tokens), workers)
    assert math.isfinite(made.whole_s)
    if made.prefill is None or made.decode is None:
        assert made.prefill is made.decode is None
        assert made.reason is not SplitReason.CHEAPER
        return
    lead, follower = workers[made.prefill], workers[made.decode]
    assert lead.namespace == follower.namespace
    assert (lead.role, follower.role == Role.PREFILL) == (Role.PREFILL, False)
    assert lead.state.rates.store_blocks_per_s > 0
    assert follower.state.rates.store_blocks_per_s > 0
    assert made.split_s is not None
    assert made.split_s < made.whole_s


@given(workers=st.lists(ANY_WORKER, min_size=1, max_size=6), num_tokens=st.integers(1, 10_000))
def test_without_a_store_nothing_is_split(workers: list[Candidate], num_tokens: int) -> None:
    """Rates of 0, which is what workers say whose store is away, or who have none."""
    bare = [
        msgspec.structs.replace(
            c,
            state=msgspec.structs.replace(
                c.state, rates=msgspec.structs.replace(c.state.rates, store_blocks_per_s=0.0)
            ),
        )
        for c in workers
    ]
    assert not plan(ask(num_tokens), bare).is_split


@given(workers=st.lists(ANY_WORKER, min_size=1, max_size=6), num_tokens=st.integers(1, 10_000))
def test_somebody_takes_it_whole(workers: list[Candidate], num_tokens: int) -> None:
    """Wherever there are workers, and no prefill worker at its post while there are others."""
    found = takers(ask(num_tokens), workers)
    assert found
    if any(c.acting_role is not Role.PREFILL for c in workers):
        assert all(c.acting_role is not Role.PREFILL for c in found)


@given(
    num_blocks=st.lists(st.integers(1, 250), min_size=2, max_size=6),
    running=st.integers(1, 8),
    waiting_tokens=st.integers(0, 5000),
    prefilling=st.integers(0, 5000),
    role=st.sampled_from([Role.BOTH, Role.DECODE]),
)
def test_longer_prompts_are_split_no_less_often(
    num_blocks: list[int], running: int, waiting_tokens: int, prefilling: int, role: Role
) -> None:
    """Where answers would wait, and the store is fast: past the length where it pays it goes on paying."""
    workers = [
        worker(0, Role.PREFILL, waiting_tokens=prefilling),
        worker(1, role, running=running, waiting_tokens=waiting_tokens, max_sequences=16),
    ]
    plans: list[Plan] = [plan(ask(number * BLOCK + 1), workers) for number in sorted(num_blocks)]
    are_split = [made.is_split for made in plans]
    assert are_split == sorted(are_split)
