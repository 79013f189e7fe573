"""`antiphon tenants erase`: a tenant goes, with its keys, its usage and its KV, and what went is said.

In this order: the database, in one transaction; then a wait until every gateway has noticed and has told
its workers to drop what they hold in memory; then what was written meanwhile, and the blocks in the store.
What fails after the transaction can be done again, by the tenant's id: nothing else of it is known then.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from collections import Counter
from collections.abc import Mapping

import msgspec

from antiphon.cli import database, kvclear, kvplace, options
from antiphon.cli.kvplace import Place
from antiphon.cli.terminal import make_safe
from antiphon.core.errors import BadRequest
from antiphon.gateway.keyring import TTL_S
from antiphon.kv import redisurl
from antiphon.kv.store import StoreFault
from antiphon.store.database import Database
from antiphon.store.tenants import Erasure, TenantStore

WAIT_S = TTL_S + 1.0  # until gateways have noticed, and a moment for what is on its way
_WORDS = {"api_keys": "keys", "usage": "rows of usage"}


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed. `num_blocks` None: no store is known here, or `fault` says why it kept them."""

    tenant_id: str
    erased_at: datetime.datetime
    removed: dict[str, int]  # rows by table
    num_blocks: int | None = None
    fault: str | None = None


def add_parser(actions: argparse._SubParsersAction[options.CommandParser]) -> None:
    """The action and its options."""
    made = actions.add_parser(
        "erase",
        help="remove a tenant and all that is its",
        description="Remove a tenant, its keys, its usage, its KV in the store, and, through running "
        f"gateways, its KV in the memory of workers. Its keys are refused within {TTL_S:g} seconds; answers "
        "that are open end as they would. As this cannot be undone, its name is asked for first.",
        epilog="examples:\n  antiphon tenants erase acme\n"
        "  antiphon tenants erase tenant_0123456789abcdef --yes --redis redis://cache:6379",
    )
    made.add_argument("name", metavar="NAME|ID", help="its name; its id to go on with one that was erased")
    kvplace.add_store_options(made)
    made.add_argument("--yes", action="store_true", help="do not ask")
    made.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Erase, after asking; 1 where the answer is no, or blocks are left. Raises BadRequest, NotFound,
    StoreUnavailable.
    """
    place = Place(args, environ)
    url, store = place.database(), place.store()
    with database.told(url):
        tenant_id, rows = asyncio.run(_look(url, args.name))
        match = place.match_erased(tenant_id)
        if not args.yes and not _is_sure(args.name, rows, store):
            return 1
        erasure = asyncio.run(_erase(url, tenant_id))
    report = _clear(erasure, store, match)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(args.name, report, store)
    return 0 if report.fault is None else 1


async def _look(url: str, name: str) -> tuple[str, Mapping[str, int]]:
    opened = await Database.open(url)
    try:
        tenants = TenantStore(opened)
        tenant_id = await tenants.find(name)
        return tenant_id, await tenants.count(tenant_id)
    finally:
        await opened.close()


async def _erase(url: str, tenant_id: str) -> Erasure:
    """What it removed, and what was written until gateways knew."""
    opened = await Database.open(url)
    try:
        tenants = TenantStore(opened)
        erasure = await tenants.erase(tenant_id)
        print(f"The tenant is erased; {WAIT_S:g} s until gateways know it …", file=sys.stderr)
        await asyncio.sleep(WAIT_S)
        late = await tenants.sweep(tenant_id)
    finally:
        await opened.close()
    removed = dict(Counter(erasure.removed) + Counter(late))
    return Erasure(erasure.id, tenant_id, erasure.erased_at, {name: removed.get(name, 0) for name in late})


def _clear(erasure: Erasure, store: str | None, match: str) -> _Report:
    num_blocks, fault = None, None
    if store is not None:
        try:
            num_blocks = kvclear.clear(store, match)
        except StoreFault as error:
            fault = str(error)
    return _Report(
        tenant_id=erasure.tenant_id,
        erased_at=erasure.erased_at,
        removed=erasure.removed,
        num_blocks=num_blocks,
        fault=fault,
    )


def _print(name: str, report: _Report, store: str | None) -> None:
    print(f"Erased {make_safe(name)} ({report.tenant_id}):")
    for table, num_rows in report.removed.items():
        print(f"  {num_rows} {_WORDS.get(table, table)}")
    again = f"antiphon tenants erase {report.tenant_id}"
    if store is None:
        print("  No store of KV blocks is known here. Where workers share one, go on with:")
        print(f"    {again} --redis URL")
    elif report.fault is not None:
        print(f"  its KV in {redisurl.parse(store)} is still there: {make_safe(report.fault)}. Go on with:")
        print(f"    {again}")
    else:
        print(f"  {report.num_blocks} blocks of KV in {redisurl.parse(store)}")
    print(
        "Gateways that run have told their workers to drop its KV, and do so again for what open answers "
        "leave."
    )


def _is_sure(name: str, rows: Mapping[str, int], store: str | None) -> bool:
    if not sys.stdin.isatty():
        raise BadRequest("nobody can be asked here: say --yes")
    what = ", ".join(f"{num_rows} {_WORDS.get(table, table)}" for table, num_rows in rows.items())
    where = "" if store is None else f" and its KV in {redisurl.parse(store)}"
    sys.stderr.write(f"Erase tenant {make_safe(name)}: {what}{where}? Type its name to go on: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() == name
