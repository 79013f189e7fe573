"""What waits to be written of a gateway's rows of usage."""

from __future__ import annotations

import datetime

from antiphon.gateway.usageledger import Ledger
from antiphon.store.usage import Ending, Opening, Tally

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)


def opening(row: str) -> Opening:
    """A request."""
    return Opening(
        id=row, tenant_id="t", key_id=None, gateway_id="gw", model="m", endpoint="e", opened_at=NOON
    )


def ending(tokens: int = 1) -> Ending:
    """Its end."""
    return Ending(tally=Tally(model="m", answer_tokens=tokens), closed_at=NOON, outcome="ok", status=200)


def test_what_waits_is_taken_together() -> None:
    """Openings in their order, what was counted, and ends; then there is nothing more."""
    ledger = Ledger()
    assert not ledger.has_more
    assert ledger.open(opening("a"))
    assert ledger.open(opening("b"))
    ledger.count("a", Tally(model="m", answer_tokens=1))
    ledger.count("a", Tally(model="m", answer_tokens=2))
    assert ledger.end("b", ending())
    batch = ledger.take()
    assert [each.id for each in batch.openings] == ["a", "b"]
    assert {row: tally.answer_tokens for row, tally in batch.tallies.items()} == {"a": 2}
    assert list(batch.endings) == ["b"]
    assert (ledger.has_more, ledger.num_waiting) == (False, 3)
    ledger.written()
    assert ledger.num_waiting == 0


def test_a_row_waits_until_it_is_written() -> None:
    """Taken is not written: a failed write has it wait on."""
    ledger = Ledger()
    ledger.open(opening("a"))
    assert ledger.is_waiting("a")
    ledger.take()
    assert ledger.is_waiting("a")
    ledger.failed()
    assert ledger.is_waiting("a")
    ledger.take()
    ledger.written()
    assert not ledger.is_waiting("a")


def test_what_failed_goes_first() -> None:
    """It stands ahead of what came meanwhile; counts that are older than an end or a later count are gone."""
    ledger = Ledger(most_at_once=2)
    for row in "abc":
        ledger.open(opening(row))
    ledger.count("a", Tally(model="m", answer_tokens=1))
    ledger.count("b", Tally(model="m", answer_tokens=1))
    assert [each.id for each in ledger.take().openings] == ["a", "b"]
    ledger.end("a", ending(5))
    ledger.count("b", Tally(model="m", answer_tokens=3))
    ledger.failed()
    batch = ledger.take()
    assert [each.id for each in batch.openings] == ["a", "b"]
    assert {row: tally.answer_tokens for row, tally in batch.tallies.items()} == {"b": 3}
    assert batch.endings["a"].tally.answer_tokens == 5
    ledger.written()
    assert [each.id for each in ledger.take().openings] == ["c"]


def test_an_end_waits_for_its_opening() -> None:
    """An end whose opening finds no place in the batch comes with a later one."""
    ledger = Ledger(most_at_once=1)
    for row in "ab":
        ledger.open(opening(row))
        ledger.end(row, ending())
    for row in "ab":
        batch = ledger.take()
        assert ([each.id for each in batch.openings], list(batch.endings)) == ([row], [row])
        ledger.written()
    assert not ledger.has_more


def test_what_finds_no_room_is_said() -> None:
    """Openings and ends have bounds of their own, which count what is under way."""
    ledger = Ledger(most_waiting=1)
    assert ledger.open(opening("a"))
    assert not ledger.open(opening("b"))
    ledger.take()
    assert not ledger.open(opening("b"))
    ledger.written()
    assert ledger.open(opening("b"))
    assert ledger.end("a", ending())
    assert not ledger.end("b", ending())
