"""How much may wait for a place, and how long: the options that `antiphon serve` hands to its gateway."""

from __future__ import annotations

import argparse

from antiphon.cli import options
from antiphon.core.generation import Priority
from antiphon.router.admission import LONGEST_WAIT_S, QueueBounds

_USUAL = QueueBounds()
_MOST_WAIT_S = LONGEST_WAIT_S[Priority.INTERACTIVE]
_OPTIONS = ("queue_requests", "queue_tokens", "queue_wait")


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """The bounds of the queue in front of each model."""
    parser.add_argument(
        "--queue-requests",
        type=options.whole(1, 100_000),
        default=_USUAL.num_requests,
        metavar="N",
        help="requests that may wait for a place at a model",
    )
    parser.add_argument(
        "--queue-tokens",
        type=options.whole(1),
        default=_USUAL.num_tokens,
        metavar="N",
        help="tokens these may be together, prompts and expected answers",
    )
    parser.add_argument(
        "--queue-wait",
        type=options.whole(1, 3600),
        default=round(_MOST_WAIT_S),
        metavar="SECONDS",
        help="the longest an interactive request waits there; default three times that, batch twelve times",
    )


def queue_of(args: argparse.Namespace) -> QueueBounds:
    """What the options say."""
    factor = args.queue_wait / _MOST_WAIT_S
    waits_s = {priority: factor * seconds for priority, seconds in LONGEST_WAIT_S.items()}
    return QueueBounds(args.queue_requests, args.queue_tokens, waits_s)


def queue_arguments(args: argparse.Namespace) -> list[str]:
    """The same options for a gateway's command line."""
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(args, name))) for name in _OPTIONS]
    return [part for pair in pairs for part in pair]
