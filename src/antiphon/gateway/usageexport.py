"""Usage in the forms in which it leaves: JSON and CSV, a piece at a time. Pure but for what it reads from.

What it is made from comes in pages and leaves in as many pieces. In CSV no cell is a formula to a
spreadsheet: what begins like one is put behind an apostrophe.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import msgspec

from antiphon.core.errors import BadRequest
from antiphon.store.usagereport import By, UsageRecord, UsageReport, UsageTotal, Wanted

Page: TypeAlias = Sequence[UsageRecord] | Sequence[UsageTotal]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


async def pages(report: UsageReport, wanted: Wanted, by: By) -> AsyncIterator[Page]:
    """What a report has to say. Raises StoreUnavailable."""
    if by is By.REQUEST:
        async for page in report.records(wanted):
            yield page
    else:
        yield await report.totals(wanted, by)


async def json_pieces(found: AsyncIterator[Page], before: bytes, after: bytes) -> AsyncIterator[bytes]:
    """One JSON array, between `before` and `after`."""
    between = b""
    yield before + b"["
    async for page in found:
        if page:
            yield between + b",\n".join(map(msgspec.json.encode, page))
            between = b",\n"
    yield b"]" + after


async def csv_pieces(found: AsyncIterator[Page], by: By) -> AsyncIterator[bytes]:
    """A line of names, then a line each, as RFC 4180 has it."""
    kind = UsageRecord if by is By.REQUEST else UsageTotal
    yield _lines([kind.__struct_fields__])
    async for page in found:
        yield _lines([[_cell(value) for value in msgspec.structs.astuple(row)] for row in page])


def time_of(text: str, param: str) -> datetime.datetime:
    """`2026-12-01`, or a time as ISO 8601 has it; without a zone it is UTC. Raises BadRequest."""
    try:
        time = datetime.datetime.fromisoformat(text)
        return time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{text[:40]!r} is no time: write 2026-12-01 or 2026-12-01T12:00:00Z", param=param
        ) from None


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case datetime.datetime():
            return value.isoformat()
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
