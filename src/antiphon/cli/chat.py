"""`antiphon chat`: talk to a model in the terminal, over the public API.

A conversation in a terminal, or one question on stdin and its answer on stdout. Ctrl-C stops an
answer: the connection closes and the server computes no further. What was said so far stays in the
conversation. Leaves how text travels to cli/conversation.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from antiphon.cli import options
from antiphon.cli.conversation import Conversation, Refusal
from antiphon.cli.terminal import make_safe, make_valid

_HELP = """/system TEXT  set the system prompt (and begin anew)
/clear        begin anew
/exit         leave; so does Ctrl-D, and Ctrl-C at the prompt
Ctrl-C stops an answer."""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon chat",
        description="Talk to a model. With stdin not a terminal: one question in, one answer out.",
        epilog="examples:\n  antiphon chat\n  echo 'What is a fugue?' | antiphon chat --temperature 0",
    )
    made.add_argument(
        "--url", default=f"http://{options.LOOPBACK}:{options.PORT}", help="where Antiphon serves"
    )
    made.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file: who vouches for the server at an https URL (default: the system's authorities)",
    )
    made.add_argument(
        "--key",
        metavar="KEY",
        help="key to call with; others on this machine may see it here (default: $ANTIPHON_API_KEY)",
    )
    made.add_argument("--model", metavar="NAME", help="model to talk to (default: the server's first)")
    made.add_argument("--system", metavar="TEXT", help="system prompt")
    made.add_argument(
        "--temperature",
        type=_temperature,
        metavar="0..2",
        help="0 always takes the likeliest token (default: 1)",
    )
    return made


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves; 1 when the server refused a question from stdin. Raises BadRequest."""
    key = args.key if args.key is not None else os.environ.get("ANTIPHON_API_KEY")
    with Conversation(args.url, args.temperature, key, args.ca) as conversation:
        conversation.choose_model(args.model)
        conversation.system = args.system
        if sys.stdin.isatty():
            _talk(conversation)
            return 0
        return _answer_stdin(conversation)


def _answer_stdin(conversation: Conversation) -> int:
    question = make_valid(sys.stdin.read()).strip()
    if not question:
        print("antiphon chat: there is no question on stdin", file=sys.stderr)
        return 2
    return 0 if _answer(conversation, question) else 1


def _talk(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # line editing and history for input()
    print(f"Talking to {make_safe(conversation.model)}. /help says what else there is.")
    while True:
        try:
            line = make_valid(input("\n> ")).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            _command(conversation, line)
        elif line:
            _answer(conversation, line)


def _command(conversation: Conversation, line: str) -> None:
    name, _, text = line.partition(" ")
    match name:
        case "/clear":
            conversation.clear()
            print("Begun anew.")
        case "/system":
            conversation.clear()
            conversation.system = text.strip() or None
            print("Begun anew with this system prompt." if conversation.system else "No system prompt now.")
        case "/help":
            print(_HELP)
        case _:
            print(f"There is no command {make_safe(name)}. /help lists them.")


def _answer(conversation: Conversation, question: str) -> bool:
    """Print an answer as it comes; whether it came to its end or was stopped by the user."""
    try:
        with _stop_key() as is_pressed, contextlib.closing(conversation.ask(question)) as pieces:
            for text in pieces:
                if is_pressed():
                    raise KeyboardInterrupt
                sys.stdout.write(make_safe(text))
                sys.stdout.flush()
    except Refusal as refusal:
        print(f"\nantiphon chat: {make_safe(str(refusal))}", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" [stopped]", end="")
    print()
    return True


@contextlib.contextmanager
def _stop_key() -> Iterator[Callable[[], bool]]:
    """Ctrl-C inside the block raises as ever, and is remembered.

    An exception that a signal raises while Python runs a destructor is lost there.
    """
    presses: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        presses.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value
