"""How long answers may take and wait for their worker: options that `antiphon serve` hands to its gateway."""

from __future__ import annotations

import argparse

from antiphon.router.watch import Patience

_USUAL = Patience()
_REQUEST_S = 600.0
_OPTIONS = ("request_timeout", "first_token_timeout", "token_timeout", "hedge_after")


def add_patience_options(parser: argparse.ArgumentParser) -> None:
    """When an answer is given up, or goes on at another worker though its own is alive."""
    parser.add_argument(
        "--request-timeout",
        type=_seconds,
        default=_REQUEST_S,
        metavar="SECONDS",
        help=f"the longest a request may take, and ask for by x-antiphon-timeout (default: {_REQUEST_S:g})",
    )
    parser.add_argument(
        "--first-token-timeout",
        type=_seconds,
        default=_USUAL.first_token_s,
        metavar="SECONDS",
        help=f"no token after so long: elsewhere once more, or an error (default: {_USUAL.first_token_s:g})",
    )
    parser.add_argument(
        "--token-timeout",
        type=_seconds,
        default=_USUAL.token_s,
        metavar="SECONDS",
        help=f"the same between two tokens (default: {_USUAL.token_s:g})",
    )
    parser.add_argument(
        "--hedge-after",
        type=_seconds,
        metavar="SECONDS",
        help="no token after so long: a second worker computes it too, the first one wins (default: never)",
    )


def patience_of(args: argparse.Namespace) -> Patience:
    """What the options say."""
    return Patience(
        first_token_s=args.first_token_timeout, token_s=args.token_timeout, hedge_after_s=args.hedge_after
    )


def patience_arguments(args: argparse.Namespace) -> list[str]:
    """The same options for a gateway's command line."""
    given = [(name, getattr(args, name)) for name in _OPTIONS]
    pairs = [(f"--{name.replace('_', '-')}", f"{value:g}") for name, value in given if value is not None]
    return [part for pair in pairs for part in pair]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
