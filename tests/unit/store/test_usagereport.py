"""Usage asked of the database: page by page, and added up."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import pytest

from antiphon.store import usagereport
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.usage import Batch, Ending, Opening, Tally, UsageStore
from antiphon.store.usagereport import By, UsageReport, UsageTotal, Wanted

NOON = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
MIDNIGHT = NOON + 12 * HOUR


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An empty database of each kind."""
    database = await Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def report(database: Database) -> UsageReport:
    return UsageReport(database)


def opening(row: str, **fields: object) -> Opening:
    values = {"tenant_id": "local", "key_id": None, "gateway_id": "gw", "model": "asked", "endpoint": "/v1/x"}
    return Opening(id=row, **(values | {"opened_at": NOON} | fields))


def ending(
    model: str = "m", tokens: int = 2, currency: str | None = "EUR", estimated: bool = False
) -> Ending:
    tally = Tally(
        model=model,
        prompt_tokens=10,
        cached_tokens=4,
        answer_tokens=tokens,
        cost_micros=2**40 if currency else 0,
        currency=currency,
        is_estimated=estimated,
    )
    return Ending(tally=tally, closed_at=NOON + HOUR, outcome="ok", status=200)


async def records(report: UsageReport, **wanted: object) -> list[str]:
    """Ids, page after page."""
    return [row.id async for page in report.records(Wanted(**wanted)) for row in page]


async def test_every_field_comes_back(database: Database, report: UsageReport) -> None:
    """A record says all that the row holds, with the tenant by its name."""
    key, _ = await KeyStore(database).create("acme", "k")
    owner = await KeyStore(database).owner_by_id(key.id)
    assert owner is not None
    row = opening("a", tenant_id=owner.tenant_id, key_id=key.id, client_token_id="ct")
    await UsageStore(database).write(Batch([row], {}, {"a": ending()}))
    (page,) = [page async for page in report.records(Wanted())]
    (record,) = page
    assert record == usagereport.UsageRecord(
        id="a",
        tenant="acme",
        key_id=key.id,
        client_token_id="ct",
        gateway_id="gw",
        model="m",
        endpoint="/v1/x",
        opened_at=NOON,
        closed_at=NOON + HOUR,
        outcome="ok",
        status=200,
        prompt_tokens=10,
        cached_tokens=4,
        answer_tokens=2,
        cost_micros=2**40,
        currency="EUR",
        is_estimated=False,
    )
    assert await records(report, tenant="acme", key_id=key.id) == ["a"]
    assert await records(report, tenant="local") == await records(report, key_id="other") == []


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 7])
async def test_pages_hold_each_request_once(
    database: Database, report: UsageReport, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """In the order in which they came, also where many came at the same moment, and new ones come on."""
    monkeypatch.setattr(usagereport, "PAGE_ROWS", 2)
    store = UsageStore(database)
    rows = [opening(f"r{n}", opened_at=NOON + HOUR * (n // 3)) for n in reversed(range(num_rows))]
    await store.write(Batch(rows))
    found = []
    async for page in report.records(Wanted()):
        assert len(page) <= 2
        found += [row.id for row in page]
        late = datetime.datetime.now(datetime.UTC) + HOUR
        await store.write(Batch([opening(f"late{len(found)}", opened_at=late)]))
    assert found == [f"r{n}" for n in range(num_rows)]


async def test_spans_are_half_open(database: Database, report: UsageReport) -> None:
    """A request belongs to the moment at which it was let in; the end of a span is not in it."""
    rows = [opening(str(n), opened_at=NOON + HOUR * n) for n in range(4)]
    await UsageStore(database).write(Batch(rows))
    assert await records(report, since=NOON + HOUR, until=NOON + 3 * HOUR) == ["1", "2"]
    (total,) = await report.totals(Wanted(since=NOON + HOUR, until=NOON + 3 * HOUR), By.MODEL)
    assert (total.num_requests, total.num_open) == (2, 2)


@pytest.mark.parametrize("text", ["\0", "\ud800", "x'; DROP TABLE usage; --", "", "k" * 10_000])
async def test_texts_that_are_no_names(database: Database, report: UsageReport, text: str) -> None:
    """Whatever is asked for, it is data; what no database takes finds nothing."""
    await UsageStore(database).write(Batch([opening("a")]))
    assert await records(report, tenant=text) == await records(report, key_id=text) == []
    assert await report.totals(Wanted(tenant=text), By.DAY) == []
    assert await records(report) == ["a"]


async def test_totals_by_each(database: Database, report: UsageReport) -> None:
    """By day in UTC, model, tenant, key: exact sums, currencies apart, guesses counted."""
    key, _ = await KeyStore(database).create("acme", "k")
    owner = await KeyStore(database).owner_by_id(key.id)
    assert owner is not None
    theirs = {"tenant_id": owner.tenant_id, "key_id": key.id}
    await UsageStore(database).write(
        Batch(
            [
                opening("a", opened_at=MIDNIGHT - HOUR),
                opening("b", opened_at=MIDNIGHT, **theirs),
                opening("c", opened_at=MIDNIGHT, **theirs),
                opening("d", opened_at=MIDNIGHT, tenant_id="gone"),
            ],
            {},
            {
                "a": ending(),
                "b": ending(),
                "c": ending("n", tokens=2**40, currency="USD", estimated=True),
                "d": ending("n", currency=None),
            },
        )
    )

    async def groups(by: By) -> list[tuple[str | None, str | None, int]]:
        return [(t.group, t.currency, t.num_requests) for t in await report.totals(Wanted(), by)]

    later = "2026-11-02"
    assert await groups(By.DAY) == [
        ("2026-11-01", "EUR", 1),
        (later, None, 1),
        (later, "EUR", 1),
        (later, "USD", 1),
    ]
    assert await groups(By.MODEL) == [("m", "EUR", 2), ("n", None, 1), ("n", "USD", 1)]
    tenants = [("acme", "EUR", 1), ("acme", "USD", 1), ("gone", None, 1), ("local", "EUR", 1)]
    assert await groups(By.TENANT) == tenants
    assert await groups(By.KEY) == [(None, None, 1), (None, "EUR", 1), (key.id, "EUR", 1), (key.id, "USD", 1)]
    assert (await report.totals(Wanted(tenant="acme"), By.MODEL))[1] == UsageTotal(
        group="n",
        num_requests=1,
        num_open=0,
        num_estimated=1,
        prompt_tokens=10,
        cached_tokens=4,
        answer_tokens=2**40,
        cost_micros=2**40,
        currency="USD",
    )
