"""`antiphon keys create|list|change|revoke`: who may call, and how much.

Works on the database itself, whether a gateway runs or not; running gateways notice within seconds.
`create` prints the key on stdout, once, and everything else on stderr: `KEY=$(antiphon keys create)`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
from collections.abc import Sequence

import msgspec

from antiphon.cli import database, grants, options
from antiphon.cli.terminal import make_safe
from antiphon.core.grant import FULL_GRANT
from antiphon.gateway.adminschema import KeyObject, key_object
from antiphon.gateway.keyring import TTL_S
from antiphon.store.database import Database
from antiphon.store.keys import Key, KeyStore
from antiphon.store.names import LOCAL_TENANT

_HEAD = ("ID", "TENANT", "NAME", "KEY", "CREATED", "LAST USED", "REVOKED", "ALLOWS")


def parser() -> argparse.ArgumentParser:
    """The command's actions and their options."""
    made = options.CommandParser(
        "antiphon keys",
        description="Create, list, change and revoke the keys with which clients call a gateway.",
        epilog="`antiphon keys ACTION --help` describes one.\nexample:\n  antiphon keys create --tenant acme",
    )
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True, help="what to do")
    create = actions.add_parser(
        "create",
        help="create a key and print it, once",
        description="Create a key and print it. It is shown this once: the database holds only its digest. "
        "Without limits it has none.",
        epilog="examples:\n  antiphon keys create --tenant acme --name 'web site'\n"
        "  antiphon keys create --tenant acme --requests-per-minute 60 --tokens-per-day 1000000",
    )
    create.add_argument(
        "--tenant", default=LOCAL_TENANT, metavar="NAME", help="whose key it is; made where it is new"
    )
    create.add_argument("--name", default="key", metavar="TEXT", help="what you will know it by")
    grants.add_grant_options(create)
    every = actions.add_parser(
        "list",
        help="list the keys",
        description="List the keys, oldest first, revoked ones too. Their use is noted about once a minute.",
        epilog="example:\n  antiphon keys list --tenant acme",
    )
    every.add_argument("--tenant", metavar="NAME", help="only the keys of this tenant")
    change = actions.add_parser(
        "change",
        help="change what a key allows",
        description="Change what a key allows; what is not said stays. Running gateways follow within "
        f"{TTL_S:g} seconds.",
        epilog="examples:\n  antiphon keys change key_0123456789abcdef --tokens-per-minute 20000\n"
        "  antiphon keys change key_0123456789abcdef --requests-per-minute none --all-models",
    )
    change.add_argument("id", metavar="ID", help="the key's id, as `antiphon keys list` shows it")
    grants.add_grant_options(change)
    revoke = actions.add_parser(
        "revoke",
        help="end a key",
        description=f"End a key. Running gateways refuse it within {TTL_S:g} seconds.",
        epilog="example:\n  antiphon keys revoke key_0123456789abcdef",
    )
    revoke.add_argument("id", metavar="ID", help="the key's id, as `antiphon keys list` shows it")
    for action in (create, every, change, revoke):
        database.add_database_option(action)
        action.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(args: argparse.Namespace) -> int:
    """Do it. Raises BadRequest, NotFound, StoreUnavailable."""
    if args.action == "change":
        grants.require_grant_option(args)
    url = database.database_of(args, os.environ)
    with database.told(url):
        return asyncio.run(_run(args, url))


async def _run(args: argparse.Namespace, url: str) -> int:
    opened = await Database.open(url)
    try:
        keys = KeyStore(opened)
        match args.action:
            case "create":
                grant = grants.grant_of(args, FULL_GRANT)
                key, text = await keys.create(args.tenant, args.name, grant)
                _print_created(key, text, as_json=args.json)
            case "list":
                _print_list(await keys.list(args.tenant), as_json=args.json)
            case "change":
                grant = grants.grant_of(args, (await keys.find(args.id)).grant)
                _print_changed(await keys.change(args.id, grant), as_json=args.json)
            case _:
                _print_revoked(await keys.revoke(args.id), as_json=args.json)
    finally:
        await opened.close()
    return 0


def _print_created(key: Key, text: str, *, as_json: bool) -> None:
    if as_json:
        print(_json(key_object(key, text)))
        return
    print(f"{key.id} of tenant {key.tenant}. Keep the key: it is not shown again.", file=sys.stderr)
    print(text)


def _print_list(keys: Sequence[Key], *, as_json: bool) -> None:
    if as_json:
        print(_json([key_object(key) for key in keys]))
        return
    if not keys:
        print("There are no keys. Create one with: antiphon keys create", file=sys.stderr)
        return
    rows = [_HEAD, *map(_row, keys)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_changed(key: Key, *, as_json: bool) -> None:
    if as_json:
        print(_json(key_object(key)))
        return
    print(f"{key.id} of tenant {key.tenant} allows now: {grants.words_of(key.grant)}")


def _print_revoked(key: Key, *, as_json: bool) -> None:
    if as_json:
        print(_json(key_object(key)))
        return
    print(f"{key.id} of tenant {key.tenant} is revoked. Running gateways refuse it within {TTL_S:g} seconds.")


def _row(key: Key) -> Sequence[str]:
    times = (key.created_at, key.last_used_at, key.revoked_at)
    named = (key.id, key.tenant, make_safe(key.name), f"{key.shown}…")
    return (*named, *map(_time, times), grants.words_of(key.grant))


def _time(time: datetime.datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%d %H:%MZ}"


def _json(value: KeyObject | list[KeyObject]) -> str:
    return msgspec.json.encode(value).decode()
