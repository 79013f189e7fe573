"""`antiphon fleet`: the workers that have a lease in the control Redis, and what they say of themselves.

Owns the reading and the table. Reads what gateways read, with the same secret, and changes nothing.
Where the `antiphon serve` here is meant, its gateway's links are shown beside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from antiphon.cli import kvoptions, options
from antiphon.cli.kvplace import Place
from antiphon.cli.runfolder import RunCard
from antiphon.cli.supervised import fetch
from antiphon.cli.terminal import make_safe
from antiphon.core.errors import BadRequest
from antiphon.core.lease import Lease, LeaseFault
from antiphon.kv import redisurl
from antiphon.kv.controlredis import ControlFault, ControlRedis
from antiphon.kv.leases import Found, Leases
from antiphon.router.link import link_url

_LINK = re.compile(r'^antiphon_worker_up\{worker="([^"]+)"\} ([01])\.0$', re.MULTILINE)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the command tells of it."""

    id: str
    name: str
    address: str
    model: str
    namespace: str
    role: str
    version: str
    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    is_draining: bool
    age_s: float  # since its lease was renewed
    is_linked: bool | None  # to the gateway of the `antiphon serve` here; None: nobody was asked


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. `refused`: leases that do not count, by worker id."""

    workers: list[Member]
    refused: dict[str, str]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon fleet",
        description="List the workers that gateways find in the control Redis. Exit code 1 when there are "
        "none, or Redis does not answer.",
        epilog="examples:\n  antiphon fleet\n"
        "  antiphon fleet --control-redis redis://control:6379 --secret-file secret",
    )
    made.add_argument(
        "--control-redis",
        type=kvoptions.store_url(),
        metavar="URL",
        help="the Redis that leases lie in "
        f"(default: ${kvoptions.CONTROL_VARIABLE}, else that of the `antiphon serve` here)",
    )
    made.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the secret of workers and gateways (default: that of the `antiphon serve` here)",
    )
    made.add_argument(
        "--url", metavar="URL", help="the `antiphon serve` here that is meant, where several run: its URL"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(args: argparse.Namespace) -> int:
    """Print the list; 1 when it is empty or cannot be had. Raises BadRequest."""
    said = kvoptions.chosen_control(args.control_redis, os.environ, "")
    url = None if said in ("", kvoptions.NONE) else said
    card = None if url is not None and args.secret_file is not None else Place(args, os.environ).run
    url = url or (card.control if card is not None else None)
    if url is None:
        raise BadRequest("no `antiphon serve` with a control Redis runs here; name one: --control-redis URL")
    if args.secret_file is None and card is None:
        raise BadRequest("--control-redis needs --secret-file FILE, the secret of those workers")
    secret = options.read_secret(args.secret_file or Path(card.secret_file if card is not None else ""))
    try:
        listing = asyncio.run(_look(ControlRedis(redisurl.parse(url)), secret, card))
    except ControlFault as fault:
        print(f"antiphon fleet: the control Redis {redisurl.parse(url)}: {fault}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.encode(listing).decode())
    else:
        print(make_safe("\n".join(_lines(listing))))
    return 0 if listing.workers else 1


async def _look(redis: ControlRedis, secret: str, card: RunCard | None) -> Listing:
    leases = Leases(redis, secret)
    try:
        found = await leases.read(await leases.ids())
    finally:
        await leases.close()
    return listed(found, None if card is None else await _links(card))


async def _links(card: RunCard) -> Mapping[str, bool] | None:
    """By address, whether the gateway of that run is linked; None where it does not say."""
    page = await fetch(card.gateway, "/metrics")
    if page is None:
        return None
    return {address: up == "1" for address, up in _LINK.findall(page.decode(errors="replace"))}


def listed(found: Mapping[str, Found | None], links: Mapping[str, bool] | None) -> Listing:
    """What was read, in order of models and names."""
    members, refused = [], {}
    for worker_id, value in found.items():
        if value is None:
            continue
        if isinstance(value.lease, LeaseFault):
            refused[worker_id] = value.lease.value
        else:
            members.append(_member(value.lease, value.age_s, links))
    members.sort(key=lambda member: (member.model, member.name, member.address))
    return Listing(workers=members, refused=refused)


def _member(lease: Lease, age_s: float, links: Mapping[str, bool] | None) -> Member:
    info, load = lease.info, lease.load
    return Member(
        id=lease.id,
        name=info.worker,
        address=lease.address,
        model=info.model,
        namespace=info.namespace,
        role=info.role.value,
        version=info.version,
        running=load.running,
        waiting=load.waiting,
        used_blocks=load.used_blocks,
        num_blocks=info.num_blocks,
        is_draining=load.draining,
        age_s=round(age_s, 3),
        is_linked=None if links is None else links.get(link_url(lease.address), False),
    )


_HEAD = ("name", "address", "model", "namespace", "role", "state", "running", "waiting", "KV used", "seen")


def _lines(listing: Listing) -> Iterator[str]:
    if listing.workers:
        yield from _table([_HEAD, *map(_row, listing.workers)])
    else:
        yield "no worker has a lease"
    for worker_id, reason in listing.refused.items():
        yield f"worker {worker_id}: its lease does not count: {reason}"


def _row(member: Member) -> tuple[str, ...]:
    state = "draining" if member.is_draining else "no link" if member.is_linked is False else "ready"
    used = f"{member.used_blocks / member.num_blocks:.0%}" if member.num_blocks else "-"
    return (
        member.name,
        member.address,
        member.model,
        member.namespace,
        member.role,
        state,
        str(member.running),
        str(member.waiting),
        used,
        f"{member.age_s:.1f} s ago",
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
