"""`antiphon tenants create|list|erase`: whose keys and whose data there are.

Works on the database itself, whether a gateway runs or not. Erasing is in cli/erase.py.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
from collections.abc import Sequence

import msgspec

from antiphon.cli import database, erase, options
from antiphon.store.database import Database
from antiphon.store.tenants import Tenant, TenantStore

_HEAD = ("ID", "TENANT", "CREATED", "KEYS", "REVOKED")


class _TenantLine(msgspec.Struct, frozen=True):
    """A tenant as `--json` prints it. `num_keys` that work, `num_revoked` that did."""

    id: str
    name: str
    created_at: datetime.datetime
    num_keys: int
    num_revoked: int


def parser() -> argparse.ArgumentParser:
    """The command's actions and their options."""
    made = options.CommandParser(
        "antiphon tenants",
        description="Create, list and erase tenants: whose keys, usage and KV there are.",
        epilog="`antiphon tenants ACTION --help` describes one.\nexample:\n  antiphon tenants list",
    )
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True, help="what to do")
    create = actions.add_parser(
        "create",
        help="create a tenant",
        description="Create a tenant without keys. `antiphon keys create --tenant NAME` makes a new one too.",
        epilog="example:\n  antiphon tenants create acme",
    )
    create.add_argument("name", metavar="NAME", help="a-z, 0-9, '.', '_' and '-'")
    every = actions.add_parser(
        "list",
        help="list the tenants",
        description="List the tenants by name, and how many keys they have.",
        epilog="example:\n  antiphon tenants list --json",
    )
    for action in (create, every):
        database.add_database_option(action)
        action.add_argument("--json", action="store_true", help="print JSON")
    erase.add_parser(actions)
    return made


def run(args: argparse.Namespace) -> int:
    """Do it. Raises BadRequest, NotFound, StoreUnavailable."""
    if args.action == "erase":
        return erase.run(args, os.environ)
    url = database.database_of(args, os.environ)
    with database.told(url):
        return asyncio.run(_run(args, url))


async def _run(args: argparse.Namespace, url: str) -> int:
    opened = await Database.open(url)
    try:
        store = TenantStore(opened)
        if args.action == "create":
            _print_created(await store.create(args.name), as_json=args.json)
        else:
            _print_list(await store.list(), as_json=args.json)
    finally:
        await opened.close()
    return 0


def _print_created(tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_line(tenant)).decode())
    else:
        print(f"tenant {tenant.name} is {tenant.id}; a key: antiphon keys create --tenant {tenant.name}")


def _print_list(tenants: Sequence[Tenant], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode([_line(tenant) for tenant in tenants]).decode())
        return
    rows = [_HEAD, *map(_row, tenants)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not any(tenant.num_keys for tenant in tenants):
        print("There are no keys. Create one with: antiphon keys create", file=sys.stderr)


def _row(tenant: Tenant) -> Sequence[str]:
    line = _line(tenant)
    created = f"{tenant.created_at:%Y-%m-%d %H:%MZ}"
    return (line.id, line.name, created, str(line.num_keys), str(line.num_revoked))


def _line(tenant: Tenant) -> _TenantLine:
    num_revoked = tenant.num_all_keys - tenant.num_keys
    return _TenantLine(tenant.id, tenant.name, tenant.created_at, tenant.num_keys, num_revoked)
