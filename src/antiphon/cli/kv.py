"""`antiphon kv ACTION`: looks into the store of KV blocks, empties it, changes its key.

Owns the actions' names. Each action is a module of its own with `HELP`, `EXAMPLE`, `add_options(parser)`
and `run(args)`; what a store does not do becomes one line and exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Protocol

from antiphon.cli import kvclear, kvprobe, kvrotate, kvstats, kvverify, options
from antiphon.core.errors import BadRequest
from antiphon.kv.redisurl import BadStoreUrl
from antiphon.kv.store import StoreFault


class Action(Protocol):
    """What a module of an action offers."""

    HELP: str
    EXAMPLE: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


ACTIONS: Mapping[str, Action] = {
    "stats": kvstats,
    "probe": kvprobe,
    "verify": kvverify,
    "clear": kvclear,
    "rotate": kvrotate,
}


def parser() -> argparse.ArgumentParser:
    """The command's actions and their options."""
    made = options.CommandParser(
        "antiphon kv",
        description="Look into the store of KV blocks that workers share, and empty it.",
        epilog="`antiphon kv ACTION --help` describes one.\nexample:\n  antiphon kv stats",
    )
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True, help="what to do")
    for name, action in ACTIONS.items():
        one = actions.add_parser(
            name, help=action.HELP, description=action.HELP, epilog=f"example:\n{action.EXAMPLE}"
        )
        action.add_options(one)
        one.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(args: argparse.Namespace) -> int:
    """Do it; 1 when the store fails, or verify finds a bad value. Raises BadRequest."""
    try:
        return ACTIONS[args.action].run(args)
    except StoreFault as fault:
        print(f"antiphon kv {args.action}: the store failed: {fault}", file=sys.stderr)
        return 1
    except BadStoreUrl as error:  # its certificates cannot be read
        raise BadRequest(str(error)) from error
