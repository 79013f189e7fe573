"""What is learned of a queue's service."""

from __future__ import annotations

import pytest

from antiphon.core.wait import ANSWER_TOKENS
from antiphon.router.servicerate import Expectation, ServiceRate


def test_only_time_in_which_somebody_waits_counts() -> None:
    """Pauses without waiters do not make the service look slow."""
    rate = ServiceRate()
    for start_s in (0.0, 1000.0):
        rate.begin(start_s)
        for step in range(1, 11):
            rate.started(50, start_s + step / 10)
        rate.end(start_s + 1.0)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.05)


def test_a_moments_waiting_is_not_believed() -> None:
    """Nothing is known before half a second of waiting was seen."""
    rate = ServiceRate()
    rate.begin(0.0)
    rate.started(1000, 0.1)
    assert rate.tokens_per_s is None


def test_old_speed_fades() -> None:
    """A fleet that lost half its workers is soon known to be half as fast."""
    rate = ServiceRate()
    rate.begin(0.0)
    for second in range(1, 31):
        rate.started(1000, float(second))
    for second in range(31, 61):
        rate.started(500, float(second))
    assert rate.tokens_per_s == pytest.approx(560, abs=60)


def test_what_answers_need_is_learned_and_never_beyond_what_they_may_have() -> None:
    """Short answers and cached prompts make later requests light; a small limit is believed at once."""
    expectation = Expectation()
    assert expectation.num_tokens(100, 4000, 2) == 100 + 2 * ANSWER_TOKENS
    assert expectation.num_tokens(100, 8, 2) == 116
    for _ in range(200):
        expectation.learn(100, 90, 20.0)
    assert expectation.num_tokens(100, 4000, 1) == pytest.approx(30, abs=1)
    assert expectation.num_tokens(0, 0, 1) == 1
