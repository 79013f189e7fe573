"""`antiphon COMMAND …`: finds the command's module and runs it.

A module is imported only when its command is asked for, so that `antiphon --help` is there at once
and `antiphon chat` never loads an engine. Every command module holds `parser()` and `run(args)`.
What a command raises as an error of ours becomes one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from antiphon import __version__
from antiphon.cli.options import CommandParser
from antiphon.core.errors import AntiphonError

COMMANDS = {
    "serve": "start workers and a gateway on this machine",
    "chat": "talk to a model in the terminal",
    "keys": "create, list, change and revoke the keys of callers",
    "tenants": "create, list and erase tenants",
    "usage": "show what was used, and what it costs",
    "doctor": "check this machine and say what to do",
    "fleet": "list the workers that gateways find",
    "kv": "look into the store of KV blocks, and empty it",
    "gateway": "run one gateway process",
    "worker": "run one worker process",
}


class Command(Protocol):
    """What a command module offers."""

    def parser(self) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


def load(name: str) -> Command:
    """Import the module of a command."""
    return cast(Command, importlib.import_module(f"antiphon.cli.{name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code: 0 done, 1 failed, 2 asked for what cannot be done."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _without_command(arguments)
    name = arguments[0]
    command = load(name)
    args = command.parser().parse_args(arguments[1:])
    try:
        return command.run(args)
    except AntiphonError as error:
        print(f"antiphon {name}: {error.message}", file=sys.stderr)
        return 2 if error.status < 500 else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `antiphon doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _without_command(arguments: list[str]) -> int:
    lines = "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
    parser = CommandParser(
        "antiphon",
        description="Serves chat models over OpenAI's API.",
        epilog=f"commands:\n{lines}\n\n`antiphon COMMAND --help` describes one.\nexample:\n  antiphon serve",
        usage="antiphon COMMAND [OPTION ...]",
    )
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    wanted = parser.parse_known_args(arguments)[0].command
    if wanted is None:
        parser.error("which command? There are " + ", ".join(COMMANDS))
    near = difflib.get_close_matches(wanted, COMMANDS, 1)
    hint = f"did you mean {near[0]!r}?" if near else "there are " + ", ".join(COMMANDS)
    parser.error(f"there is no command {wanted!r}: {hint}")


if __name__ == "__main__":
    sys.exit(main())
