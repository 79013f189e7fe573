"""`antiphon usage`: what was used, by whom, and what it costs.

Works on the database itself, whether a gateway runs or not. Exports are written as they are read.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

from antiphon.cli import database, options
from antiphon.cli.terminal import make_safe
from antiphon.core.errors import BadRequest
from antiphon.gateway.usageexport import Page, csv_pieces, json_pieces, pages, time_of
from antiphon.store.database import Database
from antiphon.store.usage import UsageStore
from antiphon.store.usagereport import By, UsageRecord, UsageReport, UsageTotal, Wanted

_TOTALS_HEAD = ("REQUESTS", "OPEN", "PROMPT", "CACHED", "ANSWER", "COST")
_REQUESTS_HEAD = ("OPENED", "TENANT", "KEY", "MODEL", "OUTCOME", "PROMPT", "CACHED", "ANSWER", "COST", "ID")
_ROWS_AT_ONCE = 5000  # removed in one transaction
_NUMBERS = frozenset({"REQUESTS", "OPEN", "PROMPT", "CACHED", "ANSWER", "COST"})
_WIDTHS = {"OPENED": 17, "TENANT": 12, "KEY": 20, "MODEL": 16, "OUTCOME": 12, "COST": 14}  # of requests


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon usage",
        description="Show what requests used and what it costs. Days and times are UTC; `~` marks what is "
        "estimated, such as requests whose gateway was killed.",
        epilog="examples:\n  antiphon usage --since 2026-12-01 --by key\n"
        "  antiphon usage --by request --tenant acme --csv > acme.csv\n"
        "  antiphon usage --remove-before 2026-01-01",
    )
    made.add_argument("--since", metavar="TIME", help="from then on: 2026-12-01 or 2026-12-01T12:00:00Z")
    made.add_argument("--until", metavar="TIME", help="before then")
    made.add_argument("--tenant", metavar="NAME", help="only requests of this tenant")
    made.add_argument("--key", metavar="ID", help="only requests with this key")
    made.add_argument(
        "--by", choices=[by.value for by in By], default=By.DAY.value, help="what a line stands for"
    )
    made.add_argument(
        "--remove-before",
        metavar="TIME",
        help="remove what came before then, for good, and show nothing; this month stays, as budgets need it",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    database.add_database_option(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Do it. Raises BadRequest, StoreUnavailable."""
    if args.remove_before is not None:
        return _remove(args, time_of(args.remove_before, "--remove-before"))
    wanted = Wanted(
        since=None if args.since is None else time_of(args.since, "--since"),
        until=None if args.until is None else time_of(args.until, "--until"),
        tenant=args.tenant,
        key_id=args.key,
    )
    url = database.database_of(args, os.environ)
    with database.told(url):
        asyncio.run(_run(args, url, wanted))
    return 0


def _remove(args: argparse.Namespace, before: datetime.datetime) -> int:
    if (args.since, args.until, args.tenant, args.key) != (None, None, None, None):
        raise BadRequest(
            "--remove-before removes all that came before then, whosever it is: say nothing else"
        )
    this_month = datetime.datetime.now(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if before > this_month:
        raise BadRequest(f"--remove-before: budgets need this month's rows; at most {this_month:%Y-%m-%d}")
    url = database.database_of(args, os.environ)
    with database.told(url):
        num_rows = asyncio.run(_remove_rows(url, before))
    print(f'{{"removed": {num_rows}}}' if args.json else f"Removed {num_rows} rows of usage.")
    return 0


async def _remove_rows(url: str, before: datetime.datetime) -> int:
    opened = await Database.open(url)
    total = 0
    try:
        usage = UsageStore(opened)
        while num_rows := await usage.remove_before(before, _ROWS_AT_ONCE):
            total += num_rows
    finally:
        await opened.close()
    return total


async def _run(args: argparse.Namespace, url: str, wanted: Wanted) -> None:
    by = By(args.by)
    opened = await Database.open(url)
    try:
        found = pages(UsageReport(opened), wanted, by)
        if args.json:
            await _write(json_pieces(found, b"", b"\n"))
        elif args.csv:
            await _write(csv_pieces(found, by))
        else:
            async for line in _lines(found, by):
                print(line)
    finally:
        await opened.close()


async def _write(pieces: AsyncIterator[bytes]) -> None:
    async for piece in pieces:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


async def _lines(found: AsyncIterator[Page], by: By) -> AsyncIterator[str]:
    is_empty = True
    async for page in found:
        if page and is_empty and by is By.REQUEST:
            yield _request_line(_REQUESTS_HEAD)
        is_empty = is_empty and not page
        for line in _page_lines(page, by):
            yield line
    if is_empty:
        print("No requests.", file=sys.stderr)


def _page_lines(page: Page, by: By) -> Iterator[str]:
    records = [row for row in page if isinstance(row, UsageRecord)]
    for record in records:
        yield _request_line(_request_row(record))
    totals = [row for row in page if isinstance(row, UsageTotal)]
    if totals:
        yield from _table([(by.value.upper(), *_TOTALS_HEAD), *map(_total_row, totals)])


def _total_row(total: UsageTotal) -> Sequence[str]:
    mark = "~" if total.num_estimated else ""
    tokens = (total.prompt_tokens, total.cached_tokens, total.answer_tokens)
    return (
        "-" if total.group is None else make_safe(total.group),
        str(total.num_requests),
        str(total.num_open),
        *(f"{mark}{number}" for number in tokens),
        _money(total, mark),
    )


def _request_row(record: UsageRecord) -> Sequence[str]:
    mark = "~" if record.is_estimated else ""
    return (
        f"{record.opened_at:%Y-%m-%d %H:%MZ}",
        make_safe(record.tenant),
        record.key_id or "-",
        make_safe(record.model),
        record.outcome or "open",
        *(f"{mark}{n}" for n in (record.prompt_tokens, record.cached_tokens, record.answer_tokens)),
        _money(record, mark),
        record.id,
    )


def _money(row: UsageTotal | UsageRecord, mark: str) -> str:
    """Exactly: six decimals hold a millionth."""
    if row.currency is None:
        return "-"
    whole, micros = divmod(row.cost_micros, 1_000_000)
    return f"{mark}{whole}.{micros:06d} {row.currency}"


def _request_line(row: Sequence[str]) -> str:
    """Widths are fixed: lines are printed before all are known."""
    cells = []
    for name, cell in zip(_REQUESTS_HEAD, row, strict=True):
        width = _WIDTHS.get(name, 8)
        cells.append(cell.rjust(width) if name in _NUMBERS else cell.ljust(width))
    return "  ".join(cells).rstrip()


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])
