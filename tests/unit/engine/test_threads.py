"""engine.threads: the governor on simulated step times, against the best fixed count."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from antiphon.engine.threads import ThreadGovernor, fastest

Cost = Callable[[int, int], float]  # (threads, tokens) → seconds


def quiet(threads: int, num_tokens: int) -> float:
    """Two idle cores: the second thread nearly halves a step."""
    return (0.010 + 0.0045 * num_tokens) * (1.0 if threads == 1 else 0.54)


def neighbour(threads: int, num_tokens: int) -> float:
    """One core taken: two threads lose much in short steps and gain in long ones."""
    alone = 0.010 + 0.0045 * num_tokens
    if threads == 1:
        return 1.1 * alone
    return 0.12 + 0.7 * alone


@dataclass
class Drive:
    """Runs a governor over simulated steps and adds up what they took."""

    governor: ThreadGovernor
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    used: list[int] = field(default_factory=list)

    def run(self, cost: Cost, num_steps: int, num_decode: int = 1, num_prefill: int = 0) -> float:
        """Total seconds of `num_steps` steps of one shape."""
        total = 0.0
        self.used = []
        for _ in range(num_steps):
            threads = self.governor.threads_for(num_decode, num_prefill)
            seconds = cost(threads, num_decode + num_prefill)
            seconds *= 1 + self.rng.uniform(-self.noise, self.noise)
            self.governor.observe(num_decode, num_prefill, seconds)
            self.used.append(threads)
            total += seconds
        return total


def best(cost: Cost, num_steps: int, num_tokens: int = 1, counts: tuple[int, ...] = (1, 2)) -> float:
    """Total seconds of the best fixed count."""
    return num_steps * min(cost(count, num_tokens) for count in counts)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("cost", [quiet, neighbour])
def test_a_steady_machine_loses_under_three_percent(noise: float, start: int, cost: Cost) -> None:
    """Once a steady load is learned, trials cost less than 3 % in the long run, noise or not."""
    drive = Drive(ThreadGovernor((1, 2), start), noise)
    drive.run(cost, 300)
    assert drive.run(cost, 5000) <= 1.03 * best(cost, 5000)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_neighbour_that_comes_and_goes_costs_little(noise: float, num_tokens: int) -> None:
    """Over phases the total stays within 1.1 × the best count of each, plus a bounded number of steps."""
    drive = Drive(ThreadGovernor((1, 2), 2), noise)
    for cost in (quiet, neighbour, quiet, neighbour, quiet):
        worst_step = max(cost(1, num_tokens), cost(2, num_tokens))
        total = drive.run(cost, 6000, num_decode=num_tokens)
        assert total <= 1.1 * best(cost, 6000, num_tokens) + 20 * worst_step


def test_a_neighbour_is_noticed_within_a_few_steps() -> None:
    """Steps that became much slower start a trial at once, not when one is due."""
    drive = Drive(ThreadGovernor((1, 2), 2), 0.2)
    drive.run(quiet, 1000)
    drive.run(neighbour, 30)
    assert drive.used[14:].count(1) >= 14


def collapsed(threads: int, num_tokens: int) -> float:
    """Beside a neighbour with threads that spin: the second one makes a step take seconds."""
    return quiet(1, num_tokens) * (1.1 if threads == 1 else 60.0)


def test_a_collapse_ends_after_two_slow_steps() -> None:
    """One slow step calls for a trial, one pair decides it: nobody waits for five such pairs."""
    drive = Drive(ThreadGovernor((1, 2), 2), 0.2)
    drive.run(quiet, 100)
    drive.run(collapsed, 12)
    assert drive.used.count(2) <= 2


def test_a_machine_that_is_busy_from_the_start_is_seen_at_the_first_step() -> None:
    """A size without a past is compared with what a token cost when the worker started."""
    for num_tokens in (1, 4, 150):
        measured = [(n, quiet(2, n)) for n in (1, 16)]
        drive = Drive(ThreadGovernor((1, 2), 2, measured), 0.2)
        drive.run(collapsed, 12, num_decode=num_tokens)
        assert drive.used.count(2) == 1


def test_what_a_token_may_cost_holds_for_every_size() -> None:
    """Undisturbed steps of any size are never taken for absurd: the first trial comes when it is due."""
    measured = [(n, quiet(2, n)) for n in (1, 16)]
    for num_tokens in (1, 3, 9, 40, 256):
        drive = Drive(ThreadGovernor((1, 2), 2, measured), 0.2)
        drive.run(quiet, 16, num_decode=num_tokens)
        assert set(drive.used) == {2}


def test_short_and_long_steps_choose_for_themselves() -> None:
    """Beside a neighbour, single decodes take one thread and prefill chunks two, interleaved."""
    drive = Drive(ThreadGovernor((1, 2), 2), 0.2)
    decodes, chunks = [], []
    for _ in range(400):
        drive.run(neighbour, 1, num_decode=1)
        decodes += drive.used
        drive.run(neighbour, 1, num_decode=3, num_prefill=200)
        chunks += drive.used
    assert decodes[200:].count(1) > 180
    assert chunks[200:].count(2) > 180


def test_a_new_size_begins_with_what_its_neighbour_found() -> None:
    """A step size never seen does not start from the start value when others know better."""
    governor = ThreadGovernor((1, 2), 2)
    Drive(governor).run(neighbour, 100, num_decode=2)
    assert governor.threads_for(4, 0) == 1


def test_single_spikes_do_not_change_the_count() -> None:
    """One step in forty that takes ten times as long does not drive the choice away for long."""
    drive = Drive(ThreadGovernor((1, 2), 2), 0.1)
    spikes = random.Random(9)
    total = drive.run(lambda t, n: quiet(t, n) * (10 if spikes.random() < 0.025 else 1), 4000)
    fair = best(quiet, 4000) * (0.975 + 0.025 * 10)
    assert total <= 1.1 * fair


def test_many_counts_are_climbed_step_by_step() -> None:
    """On a wide machine the governor walks to the best count, up or down."""

    def wide(threads: int, num_tokens: int) -> float:
        return 1.0 / threads + 0.02 * threads

    counts = (1, 2, 4, 8, 16, 32)
    for start in (1, 32):
        drive = Drive(ThreadGovernor(counts, start), 0.1)
        drive.run(wide, 1500)
        drive.run(wide, 1000)
        assert drive.used.count(8) > 900


def test_growing_contexts_are_no_disturbance() -> None:
    """Costs that creep up over many steps do not keep starting trials."""
    drive = Drive(ThreadGovernor((1, 2), 2), 0.1)
    steps = iter(range(4000))
    drive.run(lambda t, n: quiet(t, n) * (1 + next(steps) / 1000), 4000)
    assert drive.used.count(1) < 0.03 * 4000


def test_one_allowed_count_is_always_used() -> None:
    """With nothing to choose from there are no trials."""
    drive = Drive(ThreadGovernor((2,), 2))
    drive.run(neighbour, 500)
    assert set(drive.used) == {2}


def test_empty_and_timeless_steps_are_ignored() -> None:
    """A step without tokens, or one too short for the clock, teaches nothing and breaks nothing."""
    governor = ThreadGovernor((1, 2), 2)
    governor.observe(0, 0, 0.1)
    governor.observe(1, 0, 0.0)
    assert governor.threads_for(1, 0) == 2


def test_the_start_must_be_among_the_counts() -> None:
    """Counts that are not ascending, or do not hold the start, are a programming error, said so."""
    for counts, start in (((1, 2), 3), ((2, 1), 1), ((1, 1), 1)):
        with pytest.raises(ValueError, match="must be one of the ascending counts"):
            ThreadGovernor(counts, start)


def test_fastest_takes_the_least_median_and_the_lower_of_equals() -> None:
    """At start one bad round does not decide, and a thread that gains nothing is left to others."""
    seconds = {1: iter([5.0, 1.9, 1.9]), 2: iter([1.0, 9.0, 1.0]), 4: iter([0.98, 0.99, 0.99])}
    assert fastest((1, 2, 4), lambda count: next(seconds[count])) == (2, 1.0)


def test_at_start_a_count_that_collapses_is_measured_once() -> None:
    """Beside a neighbour such a step takes seconds: one of them is enough, whichever the count is."""
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return {1: 0.01, 2: 2.0, 4: 5.0}[count]

    assert fastest((1, 2, 4), measure, rounds=5) == (1, 0.01)
    assert asked == [1, 2, 4, 1, 1, 1, 1]
