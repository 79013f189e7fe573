"""The books of a gateway over a database that answers, refuses, hangs and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal

import pytest

from antiphon.core.clock import WallClock
from antiphon.core.errors import StoreUnavailable
from antiphon.core.price import PriceEntry
from antiphon.gateway import usagebook
from antiphon.gateway.account import Account
from antiphon.gateway.callers import LOCAL, Caller
from antiphon.gateway.schema import ChatRequest, Message
from antiphon.gateway.usagebook import UsageBook
from antiphon.gateway.usageledger import MOST_AT_ONCE, MOST_WAITING
from antiphon.obs.metrics import GatewayMetrics
from antiphon.store.usage import Batch, Ending, Opening, Tally
from support.lines import Lines

PRICE = PriceEntry(input=Decimal(1), output=Decimal(10), currency="EUR")
REQUEST = ChatRequest(model="alias", messages=[Message("user", "hello")])
KEYED = Caller("tenant_1", "acme", "key_1")


class Store:
    """Rows in memory. `is_away`: every write is refused; `gate` cleared: it waits."""

    def __init__(self) -> None:
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[Batch] = []
        self.tried = asyncio.Event()
        self.left: list[str] = []

    async def write(self, batch: Batch) -> None:
        self.tried.set()
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("away", detail="gone fishing")
        self.batches.append(batch)

    async def beat(self, gateway_id: str, at: datetime.datetime) -> None:
        await self.write(Batch())

    async def beats(self) -> Mapping[str, datetime.datetime | None]:
        return {}

    async def sweep(self, still: Mapping[str, datetime.datetime | None], at: datetime.datetime) -> int:
        raise AssertionError("nobody died")

    async def leave(self, gateway_id: str) -> None:
        self.left.append(gateway_id)

    @property
    def openings(self) -> list[Opening]:
        return [opening for batch in self.batches for opening in batch.openings]

    @property
    def tallies(self) -> dict[str, Tally]:
        return {row: tally for batch in self.batches for row, tally in batch.tallies.items()}

    @property
    def endings(self) -> dict[str, Ending]:
        return {row: ending for batch in self.batches for row, ending in batch.endings.items()}


class Books:
    """A book that is being kept, and what it is kept in."""

    def __init__(self) -> None:
        self.store = Store()
        self.lines = Lines()
        self.metrics = GatewayMetrics()
        prices = {"m": PRICE}
        log = self.lines.logger()
        self.book = UsageBook(self.store, prices, self.metrics.usage, WallClock(), log)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep it until the block ends."""
        task = asyncio.create_task(self.book.run())
        await asyncio.sleep(0)  # it runs
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        with contextlib.suppress(asyncio.CancelledError):
            task.result()

    async def opened(self, caller: Caller = KEYED) -> Account:
        """A request that was let in."""
        account = Account("POST", None)
        account.caller = caller
        await self.book.open(REQUEST, account)
        return account

    def answered(self, account: Account, status: int = 200, tokens: int = 5) -> None:
        """It was asked of model `m`, said so many tokens, and ends."""
        account.ask("m")
        account.num_prompt_tokens = 7
        account.count_tokens(tokens)
        account.status = status
        account.close(self.lines.logger(), self.metrics)

    def shown(self, name: str) -> float:
        """A metric's value."""
        lines = self.metrics.render().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"antiphon_{name} ")).split()[1])


@pytest.fixture
def books() -> Books:
    return Books()


async def ready(account: Account) -> None:
    """What the gateway does before the first byte."""
    assert account.before_answer is not None
    await account.before_answer()


async def test_a_row_is_written_before_the_answer(books: Books) -> None:
    """It names who asked for what, and this gateway; the answer waits until it is there."""
    books.store.gate.clear()
    async with books.kept():
        account = await books.opened()
        waiting = asyncio.create_task(ready(account))
        await books.store.tried.wait()
        assert not waiting.done()
        books.store.gate.set()
        await waiting
        (opening,) = books.store.openings
        assert (opening.id, opening.model) == (account.request_id, "alias")
        assert (opening.tenant_id, opening.key_id) == ("tenant_1", "key_1")
        assert opening.gateway_id == books.book.gateway_id
        assert books.shown("usage_rows_open") == 1
        books.answered(account)
    ending = books.store.endings[account.request_id]
    assert (ending.outcome, ending.status) == ("ok", 200)
    assert ending.tally == Tally(model="m", prompt_tokens=7, answer_tokens=5, cost_micros=57, currency="EUR")
    assert books.shown("usage_rows_open") == books.shown("usage_writes_waiting") == 0
    assert b'antiphon_cost_total{currency="EUR",model="m"} 5.7e-05' in books.metrics.render()
    assert books.store.left == [books.book.gateway_id]


async def test_rows_are_written_together(books: Books) -> None:
    """What comes while a write is under way waits for the next one: two for any number, up to a bound."""
    books.store.gate.clear()
    async with books.kept():
        accounts = [await books.opened()]
        await books.store.tried.wait()
        accounts += [await books.opened() for _ in range(MOST_AT_ONCE)]
        books.store.gate.set()
        await asyncio.gather(*map(ready, accounts))
        assert [len(batch.openings) for batch in books.store.batches if batch.openings] == [1, MOST_AT_ONCE]
        for account in accounts:
            books.answered(account)
    assert len(books.store.endings) == MOST_AT_ONCE + 1


async def test_what_is_used_is_noted_on_the_way(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is open for long is counted on, so that a killed gateway loses little of it."""
    monkeypatch.setattr(usagebook, "_COUNT_EVERY_S", 0.01)
    async with books.kept():
        account = await books.opened()
        account.ask("m")
        account.num_prompt_tokens = 7
        account.count_tokens(2)
        async with asyncio.timeout(10):
            while account.request_id not in books.store.tallies:
                books.store.tried.clear()
                await books.store.tried.wait()
        tally = books.store.tallies[account.request_id]
        assert (tally.prompt_tokens, tally.answer_tokens, tally.cost_micros) == (7, 2, 27)
        books.answered(account, tokens=1)
    assert books.store.endings[account.request_id].tally.answer_tokens == 1  # asked anew


async def test_a_key_is_refused_before_any_work(books: Books) -> None:
    """Once the database is known to be away; when it is back, so are they, and nobody had to ask."""
    books.store.is_away = True
    async with books.kept():
        account = await books.opened()
        with pytest.raises(StoreUnavailable):
            await ready(account)
        assert books.book.is_away
        with pytest.raises(StoreUnavailable):
            await books.opened()
        assert books.shown("usage_rows_open") == 1
        account.error_code = "store_unavailable"
        books.answered(account, status=503)
        books.store.is_away = False
        await books.lines.until("usage.available")
        books.answered(await books.opened())
    assert len(books.store.openings) == 2
    refused = books.store.endings[account.request_id]
    assert (refused.outcome, refused.status) == ("store_unavailable", 503)
    assert refused.tally == Tally(model="m")  # it got nothing, and pays nothing
    (line,) = books.lines.named("usage.unavailable")
    assert line["detail"] == "gone fishing"


async def test_without_a_key_it_goes_on(books: Books) -> None:
    """Nobody is waited for, and all of it is written later."""
    books.store.is_away = True
    async with books.kept():
        accounts = [await books.opened(LOCAL) for _ in range(20)]
        await asyncio.gather(*map(ready, accounts))
        for account in accounts:
            books.answered(account)
        assert books.store.openings == []
        assert books.shown("usage_writes_waiting") == 40
        books.store.is_away = False
        await books.lines.until("usage.available")
    assert {opening.id for opening in books.store.openings} == books.store.endings.keys()
    assert len(books.store.endings) == 20
    assert books.shown("usage_rows_dropped_total") == 0


async def test_a_database_that_hangs_is_away(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that neither takes nor refuses: who waits is told in time, who comes later at once."""
    monkeypatch.setattr(usagebook, "PATIENCE_S", 0.05)
    books.store.gate.clear()
    async with books.kept():
        account, other = await books.opened(), await books.opened(LOCAL)
        with pytest.raises(StoreUnavailable):
            await ready(account)
        await ready(other)
        with pytest.raises(StoreUnavailable):
            await books.opened()
        books.store.gate.set()
        books.answered(account, status=503)
        books.answered(other)
    assert len(books.store.endings) == 2


async def test_what_finds_no_room_is_counted(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key it is dropped, and one line says so; with a key it is refused."""
    monkeypatch.setattr(usagebook, "_LAST_WRITES_S", 0.1)  # most of them do not end
    books.store.gate.clear()
    async with books.kept():
        await books.opened(LOCAL)
        await books.store.tried.wait()
        for _ in range(MOST_WAITING - 1):
            await books.opened(LOCAL)
        for _ in range(3):
            account = await books.opened(LOCAL)
            assert account.before_answer is None
            books.answered(account)
        with pytest.raises(StoreUnavailable):
            await books.opened()
        assert books.shown("usage_rows_dropped_total") == 3
        assert len(books.lines.named("usage.dropped")) == 1
        books.store.gate.set()


async def test_requests_that_end_late_are_written(books: Books) -> None:
    """The book stops last: what ends after it was told to is in it."""
    task = asyncio.create_task(books.book.run())
    account = await books.opened()
    await ready(account)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    books.answered(account)
    await asyncio.wait([task])
    assert account.request_id in books.store.endings
    assert books.store.left == [books.book.gateway_id]


async def test_what_cannot_be_written_at_the_end_is_said(books: Books) -> None:
    """A database that stays away does not keep the gateway from stopping; others sweep its rows."""
    async with books.kept():
        account = await books.opened()
        await ready(account)
        books.store.is_away = True
        books.answered(account)
    (line,) = books.lines.named("usage.lost")
    assert line["writes"] == 1
    assert books.shown("usage_rows_dropped_total") == 1
    assert books.store.left == []


async def test_a_fault_of_ours_is_no_silence(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no database says ends the book with an error, rather than leave requests unbooked."""

    async def break_down(batch: Batch) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(books.store, "write", break_down)
    task = asyncio.create_task(books.book.run())
    await books.opened()
    with pytest.raises(ZeroDivisionError):
        await task


@pytest.mark.parametrize(
    ("status", "is_gone", "error", "outcome", "tokens"),
    [
        (200, False, None, "ok", 5),
        (200, True, None, "client_gone", 5),
        (200, False, "worker_lost", "worker_lost", 5),
        (503, False, "worker_lost", "worker_lost", 0),
        (400, False, "context_length_exceeded", "context_length_exceeded", 0),
        (None, True, None, "client_gone", 5),
        (None, False, "cancelled", "cancelled", 0),
        (502, False, "a server's <odd> code", "failed", 0),
    ],
)
async def test_outcomes_and_who_pays(
    books: Books, status: int | None, is_gone: bool, error: str | None, outcome: str, tokens: int
) -> None:
    """What had begun to leave is paid for, as is what was made for a client that left; failures are not."""
    async with books.kept():
        account = await books.opened()
        account.ask("m")
        account.num_prompt_tokens = 7
        account.count_tokens(5)
        account.status, account.is_client_gone, account.error_code = status, is_gone, error
        account.close(books.lines.logger(), books.metrics)
    ending = books.store.endings[account.request_id]
    assert (ending.outcome, ending.status, ending.tally.answer_tokens) == (outcome, status, tokens)
    assert ending.tally.cost_micros == (57 if tokens else 0)


async def test_who_leaves_before_the_work_begins_pays_nothing(books: Books) -> None:
    """Its prompt was tokenised, but nobody was asked to compute it."""
    async with books.kept():
        account = await books.opened()
        account.ask("m")
        account.num_prompt_tokens = 7
        account.is_client_gone = True
        account.close(books.lines.logger(), books.metrics)
    assert books.store.endings[account.request_id].tally == Tally(model="m")


async def test_another_model_is_charged_at_its_own_price(books: Books) -> None:
    """Where a second model answered, the row is its, and what the first had begun costs nothing."""
    async with books.kept():
        account = await books.opened()
        account.ask("m")
        account.num_prompt_tokens = 1000
        account.passed_over.append("m")
        account.ask("unpriced")
        account.num_prompt_tokens = 7
        account.status = 200
        account.close(books.lines.logger(), books.metrics)
    assert books.store.endings[account.request_id].tally == Tally(model="unpriced", prompt_tokens=7)
