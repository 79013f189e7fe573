"""The bounds of the queue, as options."""

from __future__ import annotations

import argparse

import pytest

from antiphon.cli.queue import add_queue_options, queue_arguments, queue_of
from antiphon.core.generation import Priority
from antiphon.router.admission import QueueBounds


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_queue_options(parser)
    return parser.parse_args(arguments)


def test_without_options_it_is_the_usual() -> None:
    """The defaults of the policy are those of the command line."""
    assert queue_of(parsed()) == QueueBounds()


def test_the_wait_of_one_class_sets_that_of_all() -> None:
    """In the proportion that the help names."""
    waits_s = queue_of(parsed("--queue-wait", "2")).longest_wait_s
    assert waits_s == {Priority.INTERACTIVE: 2, Priority.DEFAULT: 6, Priority.BATCH: 24}


@pytest.mark.parametrize(
    "arguments", [(), ("--queue-requests", "7", "--queue-tokens", "9", "--queue-wait", "3")]
)
def test_serve_hands_them_on(arguments: tuple[str, ...]) -> None:
    """What a gateway reads of its command line is what `serve` was given."""
    args = parsed(*arguments)
    assert queue_of(parsed(*queue_arguments(args))) == queue_of(args)


@pytest.mark.parametrize("name", ["--queue-requests", "--queue-tokens", "--queue-wait"])
def test_a_queue_of_nothing_is_refused(name: str) -> None:
    """Nothing could wait in it, not for a moment."""
    with pytest.raises(argparse.ArgumentError, match="whole number"):
        parsed(name, "0")
