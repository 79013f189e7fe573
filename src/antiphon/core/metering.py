"""Whether a request is within the limits of its key: sliding windows and budgets. Pure.

Time is cut into slots of 5 s, and what counts is the current slot and the 12 before it: in no 60 seconds does
more than the limit pass, at the price of looking back up to 5 s too far. What a request needs is counted
before it is looked at (`Standing` holds it already): of requests that come at once, at however many
gateways, the first ones pass.

Invariants: nothing passes that would exceed any limit of any of its meters; a wait that is told is long
enough where nothing else comes meanwhile. Reserving and giving back are gateway/limiter.py's.
"""

from __future__ import annotations

import datetime
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from antiphon.core.grant import Meter

SLOT_S = 5.0
NUM_WHOLE_SLOTS = 12
WINDOW_S = SLOT_S * NUM_WHOLE_SLOTS
_DAY_S = 86_400.0


class LimitKind(enum.StrEnum):
    """Which limit. A closed set: metrics use it as a label."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "max_concurrent"
    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"
    TOTAL = "total_tokens"  # of a client token


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a meter stands, the request in question included. Slots are numbers of 5 s."""

    now_s: float  # of the clock that the slots are numbered by
    requests: Mapping[int, int] = field(default_factory=dict)  # by slot
    tokens: Mapping[int, int] = field(default_factory=dict)
    concurrent: int = 0
    day: int = 0
    month: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that a request would exceed. `used`: without it. `wait_s`: None, no wait helps in this life."""

    kind: LimitKind
    limit: int
    used: int
    needed: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Period:
    """The day and the month of a moment, by UTC, like `20261201` and `202612`, and how long they last yet."""

    day: str
    month: str
    day_left_s: float
    month_left_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """What a window still lets pass, and when it is empty again."""

    limit: int
    remaining: int
    reset_s: float


def period_of(unix_s: float) -> Period:
    """The day and month of this moment."""
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    next_month = (first + datetime.timedelta(days=32)).replace(day=1)
    return Period(
        day=f"{moment:%Y%m%d}",
        month=f"{moment:%Y%m}",
        day_left_s=_DAY_S - unix_s % _DAY_S,
        month_left_s=(next_month - moment).total_seconds(),
    )


def slot_of(now_s: float) -> int:
    """The slot of this moment."""
    return math.floor(now_s / SLOT_S)


def counts(slot: int, now_slot: int) -> bool:
    """Whether what lies in this slot counts now. One ahead is another gateway's that is quicker."""
    return now_slot - NUM_WHOLE_SLOTS <= slot <= now_slot + 1


def used(slots: Mapping[int, int], now_s: float) -> int:
    """What counts now, of all slots together."""
    now_slot = slot_of(now_s)
    return sum(amount for slot, amount in slots.items() if counts(slot, now_slot))


def frees_in_s(slots: Mapping[int, int], now_s: float, amount: int) -> float:
    """Seconds until so much of what counts now does so no more; inf where it is not that much."""
    now_slot = slot_of(now_s)
    for slot in sorted(slot for slot in slots if counts(slot, now_slot)):
        amount -= slots[slot]
        if amount <= 0:
            return (slot + NUM_WHOLE_SLOTS + 1) * SLOT_S - now_s
    return math.inf if amount > 0 else 0.0


def breach_of(meter: Meter, standing: Standing, num_tokens: int, period: Period) -> Breach | None:
    """The first limit that a request of so many tokens exceeds, which `standing` holds; None: it passes."""
    limits = meter.limits
    budgets = (
        (LimitKind.TOTAL, meter.max_tokens, standing.total, None),
        (LimitKind.MONTH, limits.tokens_per_month, standing.month, period.month_left_s),
        (LimitKind.DAY, limits.tokens_per_day, standing.day, period.day_left_s),
    )
    for kind, limit, total, wait_s in budgets:
        if limit is not None and total > limit:
            return Breach(kind, limit, total - num_tokens, num_tokens, wait_s)
    windows = (
        (LimitKind.TOKENS, limits.tokens_per_minute, standing.tokens, num_tokens),
        (LimitKind.REQUESTS, limits.requests_per_minute, standing.requests, 1),
    )
    for kind, limit, slots, needed in windows:
        total = used(slots, standing.now_s)
        if limit is not None and total > limit:
            wait_s = None if needed > limit else _wait_s(slots, standing.now_s, total - limit, needed)
            return Breach(kind, limit, total - needed, needed, wait_s)
    if limits.max_concurrent is not None and standing.concurrent > limits.max_concurrent:
        return Breach(LimitKind.CONCURRENT, limits.max_concurrent, standing.concurrent - 1, 1, 1.0)
    return None


def left_of(limit: int, slots: Mapping[int, int], now_s: float) -> Left:
    """What a limit still lets pass."""
    total = used(slots, now_s)
    reset_s = frees_in_s(slots, now_s, total) if total else 0.0
    return Left(limit, max(limit - total, 0), reset_s)


def share_of(meter: Meter, num_gateways: int) -> Meter:
    """What one of several gateways enforces alone: its part of what passes in a minute or at once.

    Budgets stay whole: what all used of them is known for longer than an outage lasts.
    """
    limits = meter.limits

    def part(limit: int | None) -> int | None:
        return limit if not limit else max(limit // num_gateways, 1)

    own = replace(
        limits,
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        max_concurrent=part(limits.max_concurrent),
    )
    return replace(meter, limits=own)


def _wait_s(slots: Mapping[int, int], now_s: float, amount: int, own: int) -> float:
    """As `frees_in_s`, of what others put there: this request will not be there any more."""
    now_slot = slot_of(now_s)
    others = {**slots, now_slot: slots.get(now_slot, 0) - own}
    return frees_in_s(others, now_s, amount)
