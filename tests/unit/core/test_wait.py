"""How long a request waits at a worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.wait import ANSWER_TOKENS, wait_s


def test_prompts_before_it_are_waited_for() -> None:
    """As many seconds as their tokens take."""
    assert wait_s(1000, 3, 8, token_s=0.002, step_s=0.02) == 2.0


def test_answers_that_hold_all_slots_are_waited_for() -> None:
    """One too many waits for the eighth part of an answer, in steps of a full batch; or for the prompts."""
    slot_s = ANSWER_TOKENS * 2 * 0.02 / 8
    assert wait_s(0, 8, 8, token_s=0.002, step_s=0.02) == slot_s
    assert wait_s(0, 7, 8, token_s=0.002, step_s=0.02) == 0.0
    assert wait_s(0, 9, 8, token_s=0.002, step_s=0.02) == 2 * slot_s
    assert wait_s(10_000, 8, 8, token_s=0.002, step_s=0.02) == 20.0


def test_where_the_slots_are_not_known_prompts_alone_count() -> None:
    """As at an upstream that is not ours."""
    assert wait_s(100, 50, 0, token_s=0.01, step_s=0.02) == 1.0


@given(
    num_tokens=st.integers(0, 10**6),
    num_sequences=st.integers(0, 100),
    max_sequences=st.integers(0, 64),
    token_s=st.floats(0, 1),
    step_s=st.floats(0, 1),
)
def test_more_to_do_is_never_a_shorter_wait(
    num_tokens: int, num_sequences: int, max_sequences: int, token_s: float, step_s: float
) -> None:
    """Monotone in tokens and in sequences."""

    def wait(tokens: int, sequences: int) -> float:
        return wait_s(tokens, sequences, max_sequences, token_s=token_s, step_s=step_s)

    here = wait(num_tokens, num_sequences)
    assert 0.0 <= here <= wait(num_tokens + 1, num_sequences)
    assert here <= wait(num_tokens, num_sequences + 1)
