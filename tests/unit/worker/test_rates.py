"""What a worker says of its speed: which steps count, and in which units the tiers' rates go out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import WorkerRates
from antiphon.engine.counters import Counters, StepReport
from antiphon.kv.gate import Rates
from antiphon.worker.rates import Speedometer, TierRates, is_decode, is_prefill

PROMPT = StepReport(num_sequences=2, num_tokens=101, seconds=1.5, num_prefill_tokens=100, open_s=0.5)
ANSWERS = StepReport(num_sequences=4, num_tokens=4, seconds=0.02)


def after(*steps: StepReport, start: float = 0.0) -> WorkerRates:
    """The rates after these steps."""
    meter = Speedometer()
    meter.start(start)
    for number, step in enumerate(steps, start=1):
        meter.take(number, step)
    return meter.rates(None)


def test_nothing_is_known_before_anything_was_measured() -> None:
    """0 says so; what was measured at start is known at once."""
    assert after() == WorkerRates()
    assert after(start=900.0) == WorkerRates(prefill_tokens_per_s=900.0)


def test_the_first_steps_are_believed() -> None:
    """Prompt tokens over the time that was not spent on copying blocks; seconds of a step of answers."""
    assert after(PROMPT) == WorkerRates(prefill_tokens_per_s=100.0)
    assert after(ANSWERS) == WorkerRates(step_s=0.02)
    both = after(PROMPT, ANSWERS)
    assert (both.prefill_tokens_per_s, both.step_s) == (100.0, 0.02)


def test_later_steps_move_what_is_known() -> None:
    """A tenth of the way each, as factors go: one odd step is no upheaval, twenty are believed."""
    assert 650 < after(PROMPT, start=900.0).prefill_tokens_per_s < 900
    assert after(*[PROMPT] * 60, start=900.0).prefill_tokens_per_s == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    "step",
    [
        StepReport(num_sequences=1, num_tokens=8, seconds=1.0, num_prefill_tokens=8),  # the end of a prompt
        StepReport(num_sequences=60, num_tokens=100, seconds=1.0, num_prefill_tokens=40),  # mixed
        StepReport(num_sequences=1, num_tokens=50, seconds=1.0),  # an answer computed again
        StepReport(num_sequences=1, num_tokens=1, seconds=1.0, num_prefill_tokens=1),
        StepReport(),
    ],
)
def test_steps_of_both_kinds_and_of_none_say_nothing(step: StepReport) -> None:
    """Only clear cases are measured."""
    assert after(step) == WorkerRates()


@given(num_prefill=st.integers(0, 300), num_rest=st.integers(0, 300), num_sequences=st.integers(1, 64))
def test_a_step_is_of_one_kind_at_most(num_prefill: int, num_rest: int, num_sequences: int) -> None:
    """Whatever its shape."""
    step = StepReport(num_sequences, num_prefill + num_rest, 1.0, num_prefill)
    assert not (is_prefill(step) and is_decode(step))


def test_a_step_counts_once() -> None:
    """News of the same step may come again."""
    meter = Speedometer()
    meter.take(1, PROMPT)
    slow = StepReport(num_sequences=1, num_tokens=100, seconds=100.0, num_prefill_tokens=100)
    meter.take(1, slow)
    assert meter.rates(None).prefill_tokens_per_s == 100.0


def test_what_the_tiers_go_by_is_told_in_blocks() -> None:
    """Seconds a byte become blocks a second; without a store its figures are unknown."""
    rates = Rates(rtt_s=0.001, byte_s=1e-6, import_byte_s=1e-7)
    meter = Speedometer()
    meter.start(500.0)
    known = meter.rates(TierRates(rates, block_bytes=1000, uses_store=True))
    assert known.store_rtt_s == 0.001
    assert known.store_blocks_per_s == pytest.approx(1000)
    assert known.import_s_per_block == pytest.approx(1e-4)
    assert known.prefill_tokens_per_s == 500.0
    near = meter.rates(TierRates(rates, block_bytes=1000, uses_store=False))
    assert (near.store_rtt_s, near.store_blocks_per_s) == (0.0, 0.0)
    assert near.import_s_per_block == known.import_s_per_block


def test_a_step_is_what_the_counters_gained() -> None:
    """Each field of the report is a difference, but for the sizes."""
    before = Counters(prefill_tokens=10, placed_blocks=1, import_s=0.5, open_s=1.0)
    gained = Counters(prefill_tokens=30, placed_blocks=3, import_s=0.75, open_s=1.5)
    step = StepReport.between(before, gained, [20, 1, 1], 2.0)
    assert step == StepReport(3, 22, 2.0, 20, 0.5, 2, 0.25)
