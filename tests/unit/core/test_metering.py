"""Windows of slots against a log of every request; what is told of waits and of budgets."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.grant import Limits, Meter
from antiphon.core.metering import (
    NUM_WHOLE_SLOTS,
    SLOT_S,
    WINDOW_S,
    LimitKind,
    Standing,
    breach_of,
    frees_in_s,
    left_of,
    period_of,
    share_of,
    slot_of,
    used,
)

NOON = period_of(1_796_126_400.0)  # 2026-12-01 12:00 UTC


def meter(max_tokens: int | None = None, **limits: int) -> Meter:
    return Meter(id="key_1", limits=Limits(**limits), max_tokens=max_tokens)


@given(
    limit=st.integers(1, 6),
    gaps=st.lists(st.floats(0, 30, allow_nan=False) | st.sampled_from([0.0, 4.999, 5.0, 60.0]), max_size=60),
)
def test_never_more_than_the_limit_in_any_minute(limit: int, gaps: list[float]) -> None:
    """Whatever the gaps, no 60 seconds see more than the limit; who is refused was not far from it."""
    slots: Counter[int] = Counter()
    passed: list[float] = []
    now_s = 0.0
    for gap in gaps:
        now_s += gap
        slots[slot_of(now_s)] += 1
        standing = Standing(now_s=now_s, requests=dict(slots))
        breach = breach_of(meter(requests_per_minute=limit), standing, 1, NOON)
        if breach is None:
            passed.append(now_s)
            assert sum(1 for at in passed if at > now_s - WINDOW_S) <= limit
        else:
            slots[slot_of(now_s)] -= 1
            assert sum(1 for at in passed if at >= now_s - WINDOW_S - SLOT_S) >= limit


@given(
    amounts=st.dictionaries(st.integers(100, 113), st.integers(1, 50), min_size=1),
    limit=st.integers(1, 200),
    needed=st.integers(1, 200),
)
def test_a_wait_that_is_told_is_long_enough_and_not_much_longer(
    amounts: dict[int, int], limit: int, needed: int
) -> None:
    """Come back after it and it passes; a slot earlier it would not."""
    now_s = 113 * SLOT_S + 2.0
    mine = {**amounts, 113: amounts.get(113, 0) + needed}
    one = meter(tokens_per_minute=limit)
    breach = breach_of(one, Standing(now_s=now_s, tokens=mine), needed, NOON)
    if breach is None:
        return
    assert breach.used == used(amounts, now_s)
    if breach.wait_s is None:
        assert needed > limit
        return

    def passes(at_s: float) -> bool:
        there = Counter(amounts)
        there[slot_of(at_s)] += needed
        return breach_of(one, Standing(now_s=at_s, tokens=dict(there)), needed, NOON) is None

    assert passes(now_s + breach.wait_s + 0.001)
    assert not passes(max(now_s, now_s + breach.wait_s - SLOT_S))


def test_slots_count_for_twelve_more_and_one_ahead() -> None:
    """A quicker clock's slot counts; what is older or far ahead does not."""
    now_slot = 1000
    slots = {now_slot - NUM_WHOLE_SLOTS - 1: 1, now_slot - NUM_WHOLE_SLOTS: 2, now_slot: 4, now_slot + 1: 8}
    slots[now_slot + 2] = 16
    assert used(slots, now_slot * SLOT_S + 1) == 2 + 4 + 8


def test_frees_as_slots_leave() -> None:
    """Oldest first; more than there is never comes free."""
    now_s = 112 * SLOT_S
    slots = {100: 3, 105: 2}
    assert frees_in_s(slots, now_s, 3) == pytest.approx((100 + 13) * SLOT_S - now_s)
    assert frees_in_s(slots, now_s, 4) == pytest.approx((105 + 13) * SLOT_S - now_s)
    assert frees_in_s(slots, now_s, 6) == math.inf
    assert frees_in_s({}, now_s, 0) == 0.0
    left = left_of(10, slots, now_s)
    assert (left.limit, left.remaining) == (10, 5)
    assert left.reset_s == frees_in_s(slots, now_s, 5)


@pytest.mark.parametrize(
    ("one", "standing", "kind"),
    [
        (meter(tokens_per_day=100), Standing(now_s=0, day=101), LimitKind.DAY),
        (meter(tokens_per_month=100), Standing(now_s=0, month=101), LimitKind.MONTH),
        (meter(max_tokens=100), Standing(now_s=0, total=101), LimitKind.TOTAL),
        (meter(max_concurrent=2), Standing(now_s=0, concurrent=3), LimitKind.CONCURRENT),
        (meter(tokens_per_minute=5), Standing(now_s=0, tokens={0: 6}), LimitKind.TOKENS),
        (meter(requests_per_minute=5), Standing(now_s=0, requests={0: 6}), LimitKind.REQUESTS),
    ],
    ids=lambda value: value.value if isinstance(value, LimitKind) else "",
)
def test_each_limit_alone_is_enforced(one: Meter, standing: Standing, kind: LimitKind) -> None:
    """At the limit a request passes, beyond it it is told by which limit it does not."""
    breach = breach_of(one, standing, 1, NOON)
    assert breach is not None
    assert breach.kind is kind
    assert breach_of(meter(), standing, 1, NOON) is None


def test_budgets_wait_for_their_period_and_a_spent_token_for_nothing() -> None:
    """Days and months are those of UTC."""
    assert (NOON.day, NOON.month) == ("20261201", "202612")
    assert NOON.day_left_s == 12 * 3600
    assert NOON.month_left_s == 30.5 * 86400
    day = breach_of(meter(tokens_per_day=1), Standing(now_s=0, day=2), 1, NOON)
    life = breach_of(meter(max_tokens=1), Standing(now_s=0, total=2), 1, NOON)
    assert day is not None
    assert day.wait_s == NOON.day_left_s
    assert life is not None
    assert life.wait_s is None


def test_a_gateway_alone_enforces_its_part() -> None:
    """Never nothing at all, where the limit is not nothing; budgets stay whole."""
    one = meter(requests_per_minute=10, tokens_per_minute=2, max_concurrent=0, tokens_per_day=7)
    part = share_of(one, 3).limits
    assert part == Limits(requests_per_minute=3, tokens_per_minute=1, max_concurrent=0, tokens_per_day=7)
    assert share_of(one, 1) == one
