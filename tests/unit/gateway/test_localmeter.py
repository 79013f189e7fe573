"""What a gateway knows of a key by itself, and that it forgets in time and in number."""

from __future__ import annotations

from antiphon.core.metering import SLOT_S, used
from antiphon.gateway.localmeter import LocalMeter, Meters


def test_slots_are_forgotten_when_they_count_no_more() -> None:
    """However long a key is used, a window's slots are kept."""
    meter = LocalMeter()
    for slot in range(1000):
        meter.add(slot * SLOT_S, slot, 1, 10)
    standing = meter.standing(999 * SLOT_S, "", "", "")
    assert len(standing.requests) == 13
    assert used(standing.tokens, standing.now_s) == 130


def test_giving_back_to_a_slot_that_is_gone_changes_nothing() -> None:
    """A long answer settles after its minute: the window has forgotten it, the budgets have not."""
    meter = LocalMeter()
    meter.spent = {"day": 100}
    meter.add(0.0, 0, 1, 50)
    meter.add(100 * SLOT_S, 0, 0, -20)
    standing = meter.standing(100 * SLOT_S, "day", "month", "life")
    assert (used(standing.tokens, standing.now_s), standing.day, standing.month) == (0, 130, 0)


def test_expected_answers_follow_those_that_come() -> None:
    """A key whose answers are short reserves little."""
    meter = LocalMeter()
    for _ in range(100):
        meter.learn(5)
    assert round(meter.answer_tokens) == 5


def test_the_longest_idle_are_forgotten_but_none_that_is_in_use() -> None:
    """Bounded, unless more are open at once."""
    meters = Meters(most=3)
    meters.get("busy").num_open = 1
    for name in ("a", "b", "c", "d"):
        meters.get(name)
    assert len(meters) == 3
    assert meters.get("busy").num_open == 1
    for number in range(10):
        meters.get(f"open {number}").num_open = 1
    assert len(meters) == 11
