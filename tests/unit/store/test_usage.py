"""Rows of usage: opened, counted on, ended once, swept."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from antiphon.core.errors import StoreUnavailable
from antiphon.store import database as module
from antiphon.store.database import Database, file_url
from antiphon.store.schema import UsageRow
from antiphon.store.usage import LOST, Batch, Ending, Opening, Tally, UsageStore

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)
LATER = NOON + datetime.timedelta(hours=1)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An empty database of each kind."""
    database = await Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def usage(database: Database) -> UsageStore:
    """Its usage."""
    return UsageStore(database)


def opening(row: str, **fields: object) -> Opening:
    """A request of one gateway and key."""
    values = {"tenant_id": "local", "key_id": "key_1", "gateway_id": "gw_1", "model": "asked"}
    values |= {"endpoint": "/v1/chat/completions", "opened_at": NOON}
    return Opening(id=row, **(values | fields))


def tally(answer_tokens: int = 4) -> Tally:
    """Three tokens of a prompt and so many of the answer."""
    return Tally(
        model="answered",
        prompt_tokens=3,
        cached_tokens=1,
        answer_tokens=answer_tokens,
        cost_micros=10 * answer_tokens,
        currency="EUR",
    )


def ending(outcome: str = "ok", answer_tokens: int = 4) -> Ending:
    """An end an hour later."""
    return Ending(tally=tally(answer_tokens), closed_at=LATER, outcome=outcome, status=200)


async def row_of(database: Database, row: str) -> tuple[object, ...]:
    """What is known of one request: its model, tokens, cost, end, outcome, and whether that is a guess."""
    columns = (
        UsageRow.model,
        UsageRow.prompt_tokens,
        UsageRow.cached_tokens,
        UsageRow.answer_tokens,
        UsageRow.cost_micros,
        UsageRow.currency,
        UsageRow.closed_at,
        UsageRow.outcome,
        UsageRow.is_estimated,
    )
    async with database.reading() as connection:
        return tuple((await connection.execute(select(*columns).where(UsageRow.id == row))).one())


async def test_a_row_from_its_opening_to_its_end(database: Database, usage: UsageStore) -> None:
    """It opens without tokens, is counted on, and ends with all that is known."""
    await usage.write(Batch([opening("r")]))
    assert await row_of(database, "r") == ("asked", 0, 0, 0, 0, None, None, None, False)
    await usage.write(Batch(tallies={"r": tally(2)}))
    assert await row_of(database, "r") == ("answered", 3, 1, 2, 20, "EUR", None, None, False)
    await usage.write(Batch(endings={"r": ending()}))
    assert await row_of(database, "r") == ("answered", 3, 1, 4, 40, "EUR", LATER, "ok", False)


async def test_all_of_a_row_may_come_at_once(database: Database, usage: UsageStore) -> None:
    """A request may have ended before its opening was written."""
    await usage.write(Batch([opening("r")], {"r": tally(1)}, {"r": ending()}))
    assert await row_of(database, "r") == ("answered", 3, 1, 4, 40, "EUR", LATER, "ok", False)


async def test_a_row_ends_once(database: Database, usage: UsageStore) -> None:
    """What comes after the end, be it an end or the opening again, changes nothing."""
    whole = Batch([opening("r")], {}, {"r": ending()})
    await usage.write(whole)
    first = await row_of(database, "r")
    await usage.write(whole)
    await usage.write(Batch([opening("r", model="other")], {"r": tally(9)}, {"r": ending("late", 9)}))
    assert await usage.sweep(await usage.beats(), LATER) == 0
    assert await row_of(database, "r") == first


async def test_the_truth_replaces_a_guess(database: Database, usage: UsageStore) -> None:
    """A gateway that was taken for dead has the last word on its rows, and the first of its words stands."""
    await usage.write(Batch([opening("r")], {"r": tally(2)}))
    assert await usage.sweep({"gw_1": None}, LATER) == 1
    assert await row_of(database, "r") == ("answered", 3, 1, 2, 20, "EUR", LATER, LOST, True)
    await usage.write(Batch(tallies={"r": tally(3)}))  # no more counting on: it has ended
    assert (await row_of(database, "r"))[3] == 2
    await usage.write(Batch(endings={"r": ending("ok", 7)}))
    await usage.write(Batch(endings={"r": ending("late", 9)}))
    assert await row_of(database, "r") == ("answered", 3, 1, 7, 70, "EUR", LATER, "ok", False)


async def test_only_the_dead_are_swept(database: Database, usage: UsageStore) -> None:
    """A gateway that has beaten since its beat was read lives; one that never beat but has open rows does
    not; one that has left has nothing to sweep.
    """
    await usage.beat("gw_1", NOON)
    await usage.beat("gw_gone", NOON)
    await usage.write(
        Batch([opening("alive"), opening("ghost", gateway_id="gw_2"), opening("gone", gateway_id="gw_gone")])
    )
    await usage.write(Batch(endings={"gone": ending()}))
    await usage.leave("gw_gone")
    still = await usage.beats()
    assert still == {"gw_1": NOON, "gw_2": None}
    await usage.beat("gw_1", LATER)
    assert await usage.sweep(still, LATER) == 1
    assert (await row_of(database, "alive"))[7] is None
    assert (await row_of(database, "ghost"))[7] == LOST
    assert (await row_of(database, "gone"))[7] == "ok"
    assert await usage.beats() == {"gw_1": LATER}


async def test_a_dead_gateway_is_forgotten(usage: UsageStore) -> None:
    """Once it is swept its beat is gone; where it lives after all, it comes back with the next one."""
    await usage.beat("gw_1", NOON)
    assert await usage.sweep(await usage.beats(), LATER) == 0
    assert await usage.beats() == {}
    await usage.beat("gw_1", LATER)
    assert await usage.beats() == {"gw_1": LATER}


async def test_tokens_since(usage: UsageStore) -> None:
    """A key's tokens of prompts and answers, open requests as far as they were counted, other keys' not."""
    early = NOON - datetime.timedelta(microseconds=1)
    await usage.write(
        Batch(
            [
                opening("early", opened_at=early),
                opening("open"),
                opening("ended", opened_at=LATER),
                opening("other", key_id="key_2"),
            ],
            {"open": tally(5), "early": tally(100)},
            {"ended": ending("ok", 20), "other": ending("ok", 1000)},
        )
    )
    assert await usage.tokens_since("key_1", NOON) == 3 + 5 + 3 + 20
    assert await usage.tokens_since("key_1", early) == 3 + 5 + 3 + 20 + 103
    assert await usage.tokens_since("key_3", early) == 0


@pytest.mark.parametrize(
    ("harm", "repair", "word"),
    [
        ("max_page_count = 1", "max_page_count = 1000000", "full"),
        ("query_only = ON", "query_only = OFF", "readonly"),
    ],
)
async def test_a_file_that_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, repair: str, word: str
) -> None:
    """A full disk, a file that may only be read: a batch is not there, and whole when it is repeated."""
    monkeypatch.setattr(module, "_NUM_CONNECTIONS", 1)  # what is set is set for the connection
    database = await Database.open(file_url(tmp_path / "keys.db"))
    usage = UsageStore(database)
    batch = Batch([opening(f"r{n}") for n in range(500)], {}, {f"r{n}": ending() for n in range(500)})
    async with database.reading() as connection:
        await connection.exec_driver_sql(f"PRAGMA {harm}")
    with pytest.raises(StoreUnavailable) as caught:
        await usage.write(batch)
    assert word in caught.value.detail
    assert await usage.tokens_since("key_1", NOON) == 0
    async with database.reading() as connection:
        await connection.exec_driver_sql(f"PRAGMA {repair}")
    await usage.write(batch)
    assert await usage.tokens_since("key_1", NOON) == 500 * 7
    async with database.reading() as connection:
        assert (await connection.exec_driver_sql("PRAGMA integrity_check")).scalar_one() == "ok"
    await database.close()
