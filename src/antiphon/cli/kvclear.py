"""`antiphon kv clear`: deletes blocks of a namespace, of a tenant, or all of them.

Blocks that workers hold in memory stay there until they need the room; they hold no others'.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from antiphon.cli import kvplace
from antiphon.cli.kvplace import Place
from antiphon.cli.kvscan import scan_blocks
from antiphon.core.errors import BadRequest
from antiphon.kv import redisurl
from antiphon.kv.admin import open_admin

HELP = "Delete blocks from the store: a namespace's, a tenant's, or all."
EXAMPLE = "  antiphon kv clear --tenant acme\n  antiphon kv clear --all --yes"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    kvplace.add_store_options(parser)
    kvplace.add_choice_options(parser)
    parser.add_argument("--all", action="store_true", help="blocks of every namespace and tenant")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Delete, after asking; 1 where the answer is no. Raises BadRequest, StoreFault."""
    is_chosen = args.namespace is not None or args.tenant is not None
    if args.all == is_chosen:
        raise BadRequest("say which blocks: --namespace, --tenant or both, or else --all")
    place = Place(args, os.environ)
    url, match = place.needed_store(), place.match()
    if not args.yes and not _is_sure(args, url):
        return 1
    num_deleted = clear(url, match)
    print(json.dumps({"num_deleted": num_deleted}) if args.json else f"{num_deleted} blocks deleted")
    return 0


def clear(url: str, match: str) -> int:
    """Delete the blocks that match; how many there were. Raises StoreFault."""
    with open_admin(url) as admin:
        return sum(admin.delete(list(blocks)) for blocks in scan_blocks(admin, match))


def _is_sure(args: argparse.Namespace, url: str) -> bool:
    if not sys.stdin.isatty():
        raise BadRequest("nobody can be asked here: say --yes")
    whose = f" of tenant {args.tenant}" if args.tenant is not None else ""
    where = f" in namespace {args.namespace.hex()}" if args.namespace is not None else ""
    sys.stderr.write(f"Delete all blocks{whose}{where} from {redisurl.parse(url)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
