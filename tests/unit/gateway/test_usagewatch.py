"""Which gateways live, and what becomes of the rows of those that do not."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from antiphon.core.errors import StoreUnavailable
from antiphon.gateway.usagewatch import READINGS_STILL, Stillness, UsageWatch
from antiphon.obs.metrics import GatewayMetrics
from support.lines import Lines

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)
SECOND = datetime.timedelta(seconds=1)
Beats = Mapping[str, datetime.datetime | None]


def test_a_beat_that_stands_still_is_a_death() -> None:
    """The last of seven readings that are the same says so; one that changed begins anew."""
    stillness = Stillness()
    for _ in range(READINGS_STILL - 1):
        assert stillness.read({"a": NOON, "b": NOON}) == {}
    assert stillness.read({"a": NOON, "b": NOON + SECOND}) == {"a": NOON}
    for _ in range(READINGS_STILL - 2):
        assert "b" not in stillness.read({"b": NOON + SECOND})
    assert stillness.read({"b": NOON + SECOND}) == {"b": NOON + SECOND}


def test_clocks_do_not_matter() -> None:
    """A gateway whose clock jumps back or far ahead lives as long as its beat changes."""
    stillness = Stillness()
    hour = datetime.timedelta(hours=1)
    for number in range(3 * READINGS_STILL):
        beat = NOON + SECOND * number + (hour if number % 2 else -hour)
        assert stillness.read({"a": beat}) == {}


def test_rows_without_a_gateway_are_dead_too() -> None:
    """One that never said that it lives is counted from the first reading."""
    stillness = Stillness()
    dead = [stillness.read({"ghost": None}) for _ in range(READINGS_STILL)]
    assert dead == [{}] * (READINGS_STILL - 1) + [{"ghost": None}]


def test_one_that_comes_back_begins_anew() -> None:
    """A reading in which it is not named ends the count."""
    stillness = Stillness()
    for _ in range(READINGS_STILL - 1):
        stillness.read({"a": NOON})
    assert stillness.read({}) == {}
    assert stillness.read({"a": NOON}) == {}


class Store:
    """Beats of this gateway and one other, which never changes."""

    def __init__(self) -> None:
        self.is_away = False
        self.told: dict[str, datetime.datetime | None] = {"other": NOON}
        self.swept: list[Beats] = []

    async def beat(self, gateway_id: str, at: datetime.datetime) -> None:
        if self.is_away:
            raise StoreUnavailable("away", detail="away")
        self.told[gateway_id] = NOON  # as if our clock stood still

    async def beats(self) -> Beats:
        return dict(self.told)

    async def sweep(self, still: Beats, at: datetime.datetime) -> int:
        self.swept.append(still)
        del self.told["other"]
        return 3


async def test_the_dead_are_swept_and_counted() -> None:
    """Never this gateway itself; the log names who died."""
    store, lines, metrics = Store(), Lines(), GatewayMetrics()
    watch = UsageWatch(store, "self", metrics.usage, lines.logger())
    for _ in range(2 * READINGS_STILL):
        await watch.look()
    assert store.swept == [{"other": NOON}]
    assert b"antiphon_usage_rows_swept_total 3.0" in metrics.render()
    (line,) = lines.named("usage.swept")
    assert (line["gateways"], line["rows"]) == (["other"], 3)


async def test_a_database_that_is_away_kills_nobody() -> None:
    """Readings that could not be made do not count."""
    store = Store()
    watch = UsageWatch(store, "self", GatewayMetrics().usage, Lines().logger())
    for number in range(READINGS_STILL):
        store.is_away = number % 2 == 1
        try:
            await watch.look()
        except StoreUnavailable:
            assert store.is_away
    assert store.swept == []
