"""The books of a gateway: a row of usage for each request that was let in.

A row is opened at check-in and written beside the first steps of the work: one transaction for all that
wait. Before the first byte of a success leaves, its row is in the database. While it is open, what it used
is noted every few seconds, so that little is lost with a killed gateway; it ends with the account of its
request, on every way out, once.

    the database does not answer   a request with a key: 503, before any work where that is known by then
                                   one without a key: goes on; its row waits with the others

What was answered is charged. Where a request failed before anything of a success had left for its client,
nothing is; where the client left, or the answer broke off, what was made until then is.
"""

from __future__ import annotations

import asyncio
import datetime
import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.errors import StoreUnavailable
from antiphon.core.price import PriceEntry
from antiphon.gateway.account import Account
from antiphon.gateway.schema import ChatRequest, GeneratingRequest
from antiphon.gateway.usageledger import Ledger
from antiphon.gateway.usagewatch import BEAT_S, Beats, UsageWatch
from antiphon.obs.log import Logger
from antiphon.obs.usagemetrics import UsageMetrics
from antiphon.store.schema import MODEL_CHARACTERS
from antiphon.store.usage import Batch, Ending, Opening, Tally

PATIENCE_S = 3.0  # of a request, for its row to be written
_GAP_S = 0.02  # from one write to the next, which costs about 1 ms: what comes meanwhile goes together
_ENDS_WAIT_S = 0.25  # where no opening takes them along
_COUNT_EVERY_S = 5.0
_RETRY_S = 0.5
_LAST_WRITES_S = 1.5  # from the end of the last request
_ID_BYTES = 8
_CODE = re.compile(r"[a-z0-9_]{1,48}")


class Rows(Beats, Protocol):
    """What is asked of the database. Every method raises StoreUnavailable."""

    async def write(self, batch: Batch) -> None: ...

    async def leave(self, gateway_id: str) -> None: ...


class _OpenRow:
    """A request whose row has not ended."""

    __slots__ = ("account", "asked", "told")

    def __init__(self, account: Account, asked: str) -> None:
        self.account = account
        self.asked = asked  # the model that was asked for
        self.told: Tally | None = None  # what the database was told last


class UsageBook:
    """One a gateway process. Used on its event loop alone."""

    def __init__(
        self,
        store: Rows,
        prices: Mapping[str, PriceEntry | None],
        metrics: UsageMetrics,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._store = store
        self._prices = prices
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self.gateway_id = f"gw_{secrets.token_hex(_ID_BYTES)}"
        self._ledger = Ledger()
        self._open: dict[str, _OpenRow] = {}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._write_done: asyncio.Future[None] | None = None  # of the write that comes next or is under way
        self._write_began_s: float | None = None
        self._has_failed = False  # the last write did
        self._has_dropped = False  # since the last write that did not fail
        self._is_stopping = False

    @property
    def is_away(self) -> bool:
        """Whether the database does not answer."""
        began_s = self._write_began_s
        return self._has_failed or (began_s is not None and self._clock.now() - began_s > PATIENCE_S)

    async def open(self, request: GeneratingRequest, account: Account) -> None:
        """Open the row of a request that was let in. Raises StoreUnavailable where it has a key."""
        caller = account.caller
        assert caller is not None  # CallerMiddleware: no request comes this far without one
        has_key = caller.key_id is not None
        if has_key and self.is_away:
            raise _unavailable("the database did not answer the last time")
        opening = Opening(
            id=account.request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            client_token_id=None if caller.token is None else caller.token.id,
            gateway_id=self.gateway_id,
            model=request.model[:MODEL_CHARACTERS],
            endpoint="/v1/chat/completions" if isinstance(request, ChatRequest) else "/v1/completions",
            opened_at=_now(),
        )
        if not self._ledger.open(opening):
            if has_key:
                raise _unavailable("too many rows wait to be written")
            self._drop()
            return
        self._open[opening.id] = _OpenRow(account, opening.model)
        account.at_close(partial(self._end, opening.id))
        account.before_answer = partial(self._until_written, opening.id, has_key=has_key)
        self._due.set()
        self._measure()

    async def run(self, beat_s: float = BEAT_S) -> None:
        """Write until cancelled; then write the rest, while requests end, and take leave."""
        watch = UsageWatch(self._store, self.gateway_id, self._metrics, self._log)
        writing = asyncio.create_task(self._write_on(), name="usage writes")
        others = [
            asyncio.create_task(self._count_on(), name="usage counts"),
            asyncio.create_task(watch.run(beat_s), name="usage watch"),
        ]
        try:
            await asyncio.wait([writing, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in others:
                task.cancel()
            self._is_stopping = True
            self._due.set()
            await asyncio.wait([writing], timeout=_LAST_WRITES_S)
            writing.cancel()
            results = await asyncio.gather(writing, *others, return_exceptions=True)
            await self._take_leave()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _until_written(self, row: str, *, has_key: bool) -> None:
        """Wait for the row to be in the database. Raises StoreUnavailable where it has to be there."""
        deadline_s = self._clock.now() + PATIENCE_S
        while self._ledger.is_waiting(row) and not self.is_away:
            left_s = deadline_s - self._clock.now()
            if left_s <= 0:
                break
            await asyncio.wait([self._next_write()], timeout=left_s)
        if has_key and self._ledger.is_waiting(row):
            raise _unavailable("the row was not written in time")

    def _end(self, row: str) -> None:
        """The request has ended: so does its row."""
        open_row = self._open.pop(row)
        account = open_row.account
        tally = self._tally(open_row, is_charged=account.is_charged)
        outcome = _outcome(account)
        if not self._ledger.end(
            row, Ending(tally=tally, closed_at=_now(), outcome=outcome, status=account.status)
        ):
            self._drop()
        if tally.currency is not None:
            self._metrics.cost.labels(tally.model, tally.currency).inc(tally.cost_micros / 1e6)
        self._metrics.closed.labels(outcome if outcome in ("ok", "client_gone") else "failed").inc()
        self._measure()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ENDS_WAIT_S, self._due.set)

    def _tally(self, row: _OpenRow, *, is_charged: bool = True) -> Tally:
        account = row.account
        model = row.asked if account.model is None else account.model
        if not is_charged:
            return Tally(model=model)
        prompt, cached, answer = (
            account.num_prompt_tokens,
            account.num_cached_tokens,
            account.num_answer_tokens,
        )
        price = self._prices.get(model)
        return Tally(
            model=model,
            prompt_tokens=prompt,
            cached_tokens=cached,
            answer_tokens=answer,
            cost_micros=0 if price is None else price.cost_micros(prompt, cached, answer),
            currency=None if price is None else price.currency,
            is_estimated=account.is_usage_estimated,
        )

    async def _count_on(self) -> None:
        """Note what open requests have used so far."""
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            for row_id, row in self._open.items():
                tally = self._tally(row)
                if tally != row.told:
                    row.told = tally
                    self._ledger.count(row_id, tally)
            self._due.set()

    async def _write_on(self) -> None:
        while not (self._is_stopping and self._is_done):
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            began_s = self._clock.now()
            if self._ledger.has_more or self._has_failed:
                await self._write()
            if self._has_failed and self._is_stopping:
                return
            if self._ledger.has_more or self._has_failed:
                self._due.set()
            await asyncio.sleep(_RETRY_S if self._has_failed else began_s + _GAP_S - self._clock.now())

    @property
    def _is_done(self) -> bool:
        return not self._open and not self._ledger.has_more

    async def _write(self) -> None:
        """One transaction; whoever waits for it is woken."""
        batch = self._ledger.take()
        done = self._next_write()
        self._write_began_s = self._clock.now()
        is_written = False
        try:
            if batch.is_empty:  # is the database back?
                await self._store.beat(self.gateway_id, _now())
            else:
                await self._store.write(batch)
            is_written = True
        except StoreUnavailable as error:
            self._metrics.write_failures.inc()
            if not self._has_failed:
                self._log.error("usage.unavailable", detail=error.detail)
        finally:
            if is_written:
                self._ledger.written()
                if self._has_failed:
                    self._log.info("usage.available")
                self._has_dropped = False
            else:
                self._ledger.failed()
            self._has_failed = not is_written
            self._write_began_s = None
            self._write_done = None
            done.set_result(None)
            self._measure()

    def _next_write(self) -> asyncio.Future[None]:
        if self._write_done is None:
            self._write_done = asyncio.get_running_loop().create_future()
        return self._write_done

    async def _take_leave(self) -> None:
        num_left = self._ledger.num_waiting
        if num_left:
            self._metrics.dropped.inc(num_left)
            self._log.error("usage.lost", writes=num_left)
            return  # another gateway ends the rows of ours that are open in the database
        try:
            await self._store.leave(self.gateway_id)
        except StoreUnavailable as error:
            self._log.warning("usage.unavailable", detail=error.detail)

    def _drop(self) -> None:
        self._metrics.dropped.inc()
        if not self._has_dropped:
            self._has_dropped = True
            self._log.error("usage.dropped", reason="too many rows wait to be written")

    def _measure(self) -> None:
        self._metrics.open.set(len(self._open))
        self._metrics.waiting.set(self._ledger.num_waiting)


def _outcome(account: Account) -> str:
    """How a request ended: `ok`, `client_gone`, or the code of its error."""
    if account.is_client_gone:
        return "client_gone"
    code = account.error_code
    if code is not None:
        return code if _CODE.fullmatch(code) else "failed"
    return "ok" if account.status is not None else "cancelled"


def _unavailable(detail: str) -> StoreUnavailable:
    return StoreUnavailable("Usage cannot be noted now. Please try again.", detail=detail)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
