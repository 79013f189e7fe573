"""When silence is suspect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.wire import HEARTBEAT_S
from antiphon.router.suspicion import LEAST_S, MOST_S, TICK_S, Silence


def ticks_until_suspect(silence: Silence, heard_s: float) -> int:
    """Ticks of unbroken silence until it is suspect."""
    for number in range(1, 1000):
        if silence.tick(TICK_S, heard_s):
            return number
    raise AssertionError("never suspect")


def test_silence_is_suspect_within_half_a_second_or_so() -> None:
    """For a worker that spoke at each heartbeat."""
    silence = Silence(0.0)
    assert LEAST_S <= ticks_until_suspect(silence, 0.0) * TICK_S <= 2 * HEARTBEAT_S + 0.2


def test_a_worker_that_pauses_is_given_more_time() -> None:
    """It was suspected and spoke again: from now on such a pause is usual for it, and forgotten later."""
    silence = Silence(0.0)
    before = ticks_until_suspect(silence, 0.0)
    assert not silence.tick(TICK_S, 1.0)
    after = ticks_until_suspect(silence, 1.0)
    assert after > 1.5 * before
    silence.tick(TICK_S, 2.0)
    for number in range(1200):
        silence.tick(TICK_S, 3.0 + number)
    assert ticks_until_suspect(silence, 2000.0) <= before


def test_a_gateway_that_slept_blames_nobody() -> None:
    """A tick that comes a minute late is no minute of silence."""
    silence = Silence(0.0)
    assert not silence.tick(60.0, 0.0)
    assert silence.silent_s <= 2 * TICK_S


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=100))
def test_its_limit_has_bounds(history: list[tuple[float, bool]]) -> None:
    """Whatever happened, silence is suspect neither at once nor never; who speaks is not suspect."""
    silence = Silence(0.0)
    heard_s = 0.0
    for elapsed_s, speaks in history:
        heard_s += speaks
        is_suspect = silence.tick(elapsed_s, heard_s)
        assert LEAST_S <= silence.limit_s <= MOST_S
        assert not (speaks and is_suspect)
