"""What was used, asked of the database: request by request, or added up.

Invariants: requests are read in pages, each a transaction of its own, so that an export of any length
holds up nobody and fits in little memory; days are those of UTC, on which requests were let in; sums are
exact, and never over two currencies. Reads only: store/usage.py writes.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, case, false, func, or_, select

from antiphon.store.database import Database
from antiphon.store.names import is_tenant
from antiphon.store.schema import TenantRow, UsageRow

PAGE_ROWS = 1000


class By(enum.StrEnum):
    """What a line of a report stands for."""

    REQUEST = "request"
    DAY = "day"
    MODEL = "model"
    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which requests: let in from `since` to before `until`, of a tenant (by name), of a key (by id)."""

    since: datetime.datetime | None = None
    until: datetime.datetime | None = None
    tenant: str | None = None
    key_id: str | None = None


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `closed_at` null: it is open, and its tokens are those known so far. `prompt_tokens` holds
    the cached ones too. `cost_micros`: millionths of the currency. `outcome`: ok, client_gone, an error's
    code, or lost: its gateway was killed.
    """

    id: str
    tenant: str
    key_id: str | None
    client_token_id: str | None
    gateway_id: str
    model: str
    endpoint: str
    opened_at: datetime.datetime
    closed_at: datetime.datetime | None
    outcome: str | None
    status: int | None
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    cost_micros: int
    currency: str | None
    is_estimated: bool


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one day, model, tenant or key, in one currency (null: without a price). `group` null:
    without a key. `num_estimated`: those whose tokens are not known exactly.
    """

    group: str | None
    num_requests: int
    num_open: int
    num_estimated: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    cost_micros: int
    currency: str | None


_TENANT: ColumnElement[str] = func.coalesce(TenantRow.name, UsageRow.tenant_id)
_GROUPS: dict[By, ColumnElement[Any]] = {
    By.DAY: func.date(UsageRow.opened_at),
    By.MODEL: UsageRow.model.expression,
    By.TENANT: _TENANT,
    By.KEY: UsageRow.key_id.expression,
}
_TOKENS = ("prompt_tokens", "cached_tokens", "answer_tokens", "cost_micros")


class UsageReport:
    """The usage in one database. Every method raises StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def records(self, wanted: Wanted) -> AsyncIterator[Sequence[UsageRecord]]:
        """The requests that there are now, oldest first, page by page."""
        until = wanted.until or datetime.datetime.now(datetime.UTC)
        query = _records().where(*_conditions(wanted), UsageRow.opened_at < until)
        query = query.order_by(UsageRow.opened_at, UsageRow.id).limit(PAGE_ROWS)
        page: Sequence[UsageRecord] = await self._page(query)
        while page:
            yield page
            if len(page) < PAGE_ROWS:
                return
            last = page[-1]
            same_moment = and_(UsageRow.opened_at == last.opened_at, UsageRow.id > last.id)
            page = await self._page(query.where(or_(UsageRow.opened_at > last.opened_at, same_moment)))

    async def totals(self, wanted: Wanted, by: By) -> Sequence[UsageTotal]:
        """Added up by anything but the request, in the order of what it is added up by."""
        group = _GROUPS[by].label("group")
        sums = [func.sum(getattr(UsageRow, name)).label(name) for name in _TOKENS]
        query = (
            select(
                group,
                UsageRow.currency,
                func.count().label("num_requests"),
                func.sum(case((UsageRow.closed_at.is_(None), 1), else_=0)).label("num_open"),
                func.sum(case((UsageRow.is_estimated, 1), else_=0)).label("num_estimated"),
                *sums,
            )
            .outerjoin(TenantRow, TenantRow.id == UsageRow.tenant_id)
            .where(*_conditions(wanted))
            .group_by(group, UsageRow.currency)
            .order_by(group.nulls_first(), UsageRow.currency.nulls_first())
        )
        if wanted.until is not None:
            query = query.where(UsageRow.opened_at < wanted.until)
        async with self._database.reading() as connection:
            return [_total(row) for row in await connection.execute(query)]

    async def _page(self, query: Select[*tuple[Any, ...]]) -> list[UsageRecord]:
        async with self._database.reading() as connection:
            return [UsageRecord(**row._mapping) for row in await connection.execute(query)]


def _records() -> Select[*tuple[Any, ...]]:
    columns = [
        _TENANT.label("tenant") if name == "tenant" else getattr(UsageRow, name)
        for name in UsageRecord.__struct_fields__
    ]
    return select(*columns).outerjoin(TenantRow, TenantRow.id == UsageRow.tenant_id)


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.since is not None:
        found.append(UsageRow.opened_at >= wanted.since)
    # Databases do not take every text there is: what cannot be a name or an id is not asked for.
    if wanted.tenant is not None:
        found.append(TenantRow.name == wanted.tenant if is_tenant(wanted.tenant) else false())
    if wanted.key_id is not None:
        found.append(UsageRow.key_id == wanted.key_id if wanted.key_id.isprintable() else false())
    return found


def _total(row: Row[*tuple[Any, ...]]) -> UsageTotal:
    """Sums come as Decimal or int, days as text or dates: it depends on the database."""
    values = dict(row._mapping)
    group, currency = values.pop("group"), values.pop("currency")
    numbers = {name: int(value) for name, value in values.items()}
    return UsageTotal(group=None if group is None else str(group), currency=currency, **numbers)
