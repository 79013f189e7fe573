"""How long answers wait for their worker, as options."""

from __future__ import annotations

import argparse

import pytest

from antiphon.cli.patience import add_patience_options, patience_arguments, patience_of
from antiphon.router.watch import Patience


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_patience_options(parser)
    return parser.parse_args(arguments)


def test_without_options_it_is_the_usual() -> None:
    """No hedging, and the limits that the help names."""
    assert patience_of(parsed()) == Patience()
    assert patience_of(parsed()).hedge_after_s is None


@pytest.mark.parametrize(
    "arguments", [(), ("--hedge-after", "0.25", "--token-timeout", "5"), ("--request-timeout", "12.5")]
)
def test_serve_hands_them_on(arguments: tuple[str, ...]) -> None:
    """What a gateway reads of its command line is what `serve` was given."""
    args = parsed(*arguments)
    assert parsed(*patience_arguments(args)) == args


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "soon"])
def test_only_seconds_above_zero(bad: str) -> None:
    """Anything else is refused with a word on it."""
    with pytest.raises(argparse.ArgumentError, match="seconds above 0"):
        parsed("--token-timeout", bad)
