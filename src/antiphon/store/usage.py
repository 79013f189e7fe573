"""What requests used, in the database: a row each, written by gateways.

Invariants: a row is there once; it ends once, with the word of the gateway that answered, which may come
after a guess (`lost`) by another and then replaces it; a write may be repeated, so that one whose fate is
unknown can be; tokens and money are whole numbers. Who lives is not told by clocks: a gateway's `seen_at`
changes while it lives, and is compared with nothing but itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from antiphon.store.database import Database
from antiphon.store.schema import GatewayRow, UsageRow

LOST = "lost"  # how the row of a gateway that was killed ended
_IDS_A_STATEMENT = 500  # databases bound the number of values in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A request that was let in. Times are aware, in UTC. `model`: the name that it asked for."""

    id: str
    tenant_id: str
    key_id: str | None
    client_token_id: str | None = None
    gateway_id: str
    model: str
    endpoint: str
    opened_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What it used so far. `model`: the one that answers; money in millionths of its currency."""

    model: str
    prompt_tokens: int = 0  # the cached ones among them
    cached_tokens: int = 0
    answer_tokens: int = 0
    cost_micros: int = 0
    currency: str | None = None
    is_estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How it ended. `status`: of the response, None where none was begun."""

    tally: Tally
    closed_at: datetime.datetime
    outcome: str
    status: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What is written together, in this order."""

    openings: Sequence[Opening] = ()
    tallies: Mapping[str, Tally] = field(default_factory=dict)  # by request
    endings: Mapping[str, Ending] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.openings or self.tallies or self.endings)


class UsageStore:
    """The usage of one database. Every method raises StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def write(self, batch: Batch) -> None:
        """Write it whole, or nothing of it. What is written already stays as it is."""
        async with self._database.writing() as connection:
            if batch.openings:
                await _insert_new(connection, [_opening(opening) for opening in batch.openings])
            if batch.tallies:
                rows = [_tally(tally) | {"row": row} for row, tally in batch.tallies.items()]
                await connection.execute(_TALLY, rows)
            if batch.endings:
                rows = [_ending(ending) | {"row": row} for row, ending in batch.endings.items()]
                await connection.execute(_END, rows)

    async def tokens_since(self, key_id: str, since: datetime.datetime) -> int:
        """Tokens of prompts and answers of this key's requests that came since then, open ones as far
        as they are known.
        """
        query = select(func.sum(UsageRow.prompt_tokens + UsageRow.answer_tokens)).where(
            UsageRow.key_id == key_id, UsageRow.opened_at >= since
        )
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one() or 0)

    async def tokens_of_client_token(self, token_id: str, since: datetime.datetime) -> int:
        """The same of a client token's requests."""
        query = select(func.sum(UsageRow.prompt_tokens + UsageRow.answer_tokens)).where(
            UsageRow.client_token_id == token_id, UsageRow.opened_at >= since
        )
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one() or 0)

    async def remove_before(self, before: datetime.datetime, at_most: int) -> int:
        """Remove rows of requests that came before then and have ended, oldest first; how many there were."""
        ended = UsageRow.opened_at < before, UsageRow.closed_at.is_not(None)
        oldest = select(UsageRow.id).where(*ended).order_by(UsageRow.opened_at, UsageRow.id).limit(at_most)
        async with self._database.writing() as connection:
            removed = await connection.execute(delete(UsageRow).where(UsageRow.id.in_(oldest)))
        return removed.rowcount

    async def beat(self, gateway_id: str, at: datetime.datetime) -> None:
        """Say that this gateway lives."""
        async with self._database.writing() as connection:
            seen = update(GatewayRow).where(GatewayRow.id == gateway_id).values(seen_at=at)
            if (await connection.execute(seen)).rowcount == 0:
                row = {"id": gateway_id, "started_at": at, "seen_at": at}
                await connection.execute(insert(GatewayRow).values(row))

    async def leave(self, gateway_id: str) -> None:
        """This gateway has ended."""
        async with self._database.writing() as connection:
            await connection.execute(delete(GatewayRow).where(GatewayRow.id == gateway_id))

    async def beats(self) -> Mapping[str, datetime.datetime | None]:
        """The last beat of each gateway; None of one that has open rows and does not say that it lives."""
        async with self._database.reading() as connection:
            return await _beats(connection)

    async def sweep(self, still: Mapping[str, datetime.datetime | None], at: datetime.datetime) -> int:
        """End the open rows of those whose last beat is still this one, as lost; how many there were."""
        num_swept = 0
        async with self._database.writing() as connection:
            beats = await _beats(connection)
            dead = sorted(gateway for gateway, beat in still.items() if beats.get(gateway) == beat)
            for start in range(0, len(dead), _IDS_A_STATEMENT):
                some = dead[start : start + _IDS_A_STATEMENT]
                theirs = update(UsageRow).where(UsageRow.gateway_id.in_(some), UsageRow.closed_at.is_(None))
                ended = theirs.values(closed_at=at, outcome=LOST, is_estimated=True)
                num_swept += (await connection.execute(ended)).rowcount
                await connection.execute(delete(GatewayRow).where(GatewayRow.id.in_(some)))
        return num_swept


_IS_MINE = UsageRow.id == bindparam("row")
_TALLY = update(UsageRow).where(_IS_MINE, UsageRow.closed_at.is_(None))
_END = update(UsageRow).where(_IS_MINE, or_(UsageRow.closed_at.is_(None), UsageRow.outcome == LOST))


def _opening(opening: Opening) -> dict[str, Any]:
    return {name: getattr(opening, name) for name in Opening.__slots__}


def _tally(tally: Tally) -> dict[str, Any]:
    return {name: getattr(tally, name) for name in Tally.__slots__}


def _ending(ending: Ending) -> dict[str, Any]:
    return _tally(ending.tally) | {
        "closed_at": ending.closed_at,
        "outcome": ending.outcome,
        "status": ending.status,
    }


async def _insert_new(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    """Insert those that are not there."""
    kind = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    await connection.execute(kind(UsageRow).on_conflict_do_nothing(), rows)


async def _beats(connection: AsyncConnection) -> dict[str, datetime.datetime | None]:
    open_rows = select(UsageRow.gateway_id).where(UsageRow.closed_at.is_(None)).distinct()
    beats: dict[str, datetime.datetime | None] = dict.fromkeys(
        (await connection.execute(open_rows)).scalars()
    )
    for gateway, seen_at in await connection.execute(select(GatewayRow.id, GatewayRow.seen_at)):
        beats[gateway] = seen_at
    return beats
