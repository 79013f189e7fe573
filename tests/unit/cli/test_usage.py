"""`antiphon usage`, on real databases."""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
import json

import pytest

from antiphon.cli.main import main
from antiphon.store.database import Database
from antiphon.store.usage import LOST, Batch, Ending, Opening, Tally, UsageStore

NOON = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
MONEY = Tally(
    model="m", prompt_tokens=10, cached_tokens=4, answer_tokens=2, cost_micros=1_000_007, currency="EUR"
)


async def _fill(url: str) -> None:
    """An answered request, one that was lost and is without a price, one that is open."""
    openings = [
        Opening(
            id=row,
            tenant_id="local",
            key_id=None,
            gateway_id="g",
            model="=m",
            endpoint="e",
            opened_at=opened_at,
        )
        for row, opened_at in (("ok", NOON), ("lost", NOON + DAY), ("open", NOON + DAY))
    ]
    database = await Database.open(url)
    store = UsageStore(database)
    await store.write(
        Batch(openings[:1], {}, {"ok": Ending(tally=MONEY, closed_at=NOON, outcome="ok", status=200)})
    )
    await store.write(Batch(openings[1:2], {"lost": Tally(model="=m", answer_tokens=3)}))
    assert await store.sweep({"g": None}, NOON) == 1
    await store.write(Batch(openings[2:]))
    await database.close()


@pytest.fixture
def url(database_url: str) -> str:
    """A database of each kind with three requests in it."""
    asyncio.run(_fill(database_url))
    return database_url


def test_a_line_a_day(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain table: sums to the last millionth, guesses marked, numbers under their heads."""
    assert main(["usage", "--database", url]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["DAY", "REQUESTS", "OPEN", "PROMPT", "CACHED", "ANSWER", "COST"]
    assert rows[0].split() == ["2026-11-01", "1", "0", "10", "4", "2", "1.000007", "EUR"]
    assert rows[1].split() == ["2026-11-02", "2", "1", "~0", "~0", "~3", "-"]
    assert len({len(row) for row in (head, *rows)}) == 1


def test_a_line_a_request(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oldest first; what is open says so."""
    assert main(["usage", "--by", "request", "--database", url]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "ID"
    assert [row.split()[-1] for row in rows] == ["ok", "lost", "open"]
    assert [row.split()[5] for row in rows] == ["ok", LOST, "open"]


def test_exports(url: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """JSON and CSV hold the same; a name that looks like a formula is none in CSV."""
    assert main(["usage", "--by", "request", "--json", "--database", url]) == 0
    rows = json.loads(capsysbinary.readouterr().out)
    assert [row["id"] for row in rows] == ["ok", "lost", "open"]
    assert [row["cost_micros"] for row in rows] == [1_000_007, 0, 0]
    assert [row["is_estimated"] for row in rows] == [False, True, False]
    assert main(["usage", "--by", "request", "--csv", "--database", url]) == 0
    lines = list(csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode())))
    assert [line["model"] for line in lines] == ["m", "'=m", "'=m"]
    assert [line["answer_tokens"] for line in lines] == ["2", "3", "0"]


def test_spans_and_filters(url: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """From, to before, whose, with which key."""

    def ids(*options: str) -> list[str]:
        assert main(["usage", "--by", "request", "--json", "--database", url, *options]) == 0
        return [row["id"] for row in json.loads(capsysbinary.readouterr().out)]

    assert ids("--since", "2026-11-02") == ["lost", "open"]
    assert ids("--until", "2026-11-02") == ["ok"]
    assert ids("--tenant", "acme") == ids("--key", "key_1") == []
    assert ids("--tenant", "local", "--since", "2026-11-01T12:00:00Z") == ["ok", "lost", "open"]


@pytest.mark.parametrize("by", ["day", "model", "tenant", "key", "request"])
def test_nothing_is_said_to_be_nothing(
    database_url: str, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    """Words for people are on stderr."""
    assert main(["usage", "--by", by, "--database", database_url]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "No requests.\n")


def test_what_is_no_time_is_one_line(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the option."""
    assert main(["usage", "--since", "yesterday", "--database", database_url]) == 2
    assert "'yesterday' is no time" in capsys.readouterr().err


def test_old_rows_are_removed_and_open_ones_stay(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What has ended before then goes, and says how much that was."""
    assert main(["usage", "--remove-before", "2026-11-30", "--database", url]) == 0
    assert capsys.readouterr().out == "Removed 2 rows of usage.\n"
    assert main(["usage", "--by", "request", "--database", url]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[-1] == "open"
    assert main(["usage", "--remove-before", "2026-11-30", "--json", "--database", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 0}


@pytest.mark.parametrize(
    "more", [["--remove-before", "2999-01-01"], ["--remove-before", "2026-01-01", "--key", "k"]]
)
def test_removing_is_refused_where_it_would_hurt(url: str, more: list[str]) -> None:
    """This month's rows are what budgets count; a part of the rows is not what it removes."""
    assert main(["usage", "--database", url, *more]) == 2
