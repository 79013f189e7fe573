"""How many threads a model step should use. Pure policy: numbers in, a count out, no time source.

The threads of a step wait for each other by spinning. Alone on the machine more of them are faster;
beside a busy neighbour the very same count can be several times slower than fewer. Who else runs
cannot be asked, it shows only in step times, so the count is tried out again and again:

* Steps are grouped by how many tokens they compute (powers of two), because a short step is mostly
  waiting and a long one mostly arithmetic: the best count differs. Each group decides for itself.
* A trial alternates the count in use with a neighbouring one, pair by pair, so that both see the
  same load; the median of the pair ratios decides and a first step that is far too slow ends it.
* A trial begins when it is due, when steps became much slower or faster than they were, or when the
  very first step of a group costs far more than any should. One pair that shows a collapse ends it, or
  one step where the cost was absurd already: another such step may take seconds. The more
  time trials in vain have lost, the longer until the next one of either kind, so that each kind
  loses at most `_TRIAL_SHARE` of the time in the long run.

Costs are seconds per token of the step, so that sizes within one group compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

_TRIAL_PAIRS = 5
_TRIAL_SHARE = 0.015  # of the time may be lost in trials that were due, and in those out of turn
_FIRST_TRIAL = 16  # steps of a group before its first trial, doubled after each trial in vain …
_LAST_TRIAL = 256  # … up to this, or more where trials lose much
_HOPELESS = 2.0  # a trial ends at once where the other count costs this many times more
_COLLAPSE = 3.0  # it is won at once where one pair shows the count in use to cost this many times more
_ABSURD = 4.0  # a group's first step that costs this many times the most a token should calls for a trial
_BETTER = 0.95  # the other count must cost less than this share to be taken
_DISTURBED = 1.3  # costs that moved by this factor either way call for a trial
_FAST, _SLOW = 0.2, 0.02  # weights of a new cost in the two moving averages compared for that
_EVEN = 1.03  # at start, counts within this factor are equal and the lower one is taken


class ThreadGovernor:
    """Chooses the thread count of each step. One engine thread owns it.

    Ask `threads_for` before a step and tell `observe` its seconds after it, in turn.
    """

    def __init__(self, counts: Sequence[int], start: int, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`counts` are those allowed, ascending; `start` is one of them.

        `measured`: tokens and seconds of some steps at start, before anything could disturb them.
        """
        if list(counts) != sorted(set(counts)) or start not in counts:
            raise ValueError(f"start {start} must be one of the ascending counts {list(counts)}")
        self._counts = tuple(counts)
        self._start = self._counts.index(start)
        self._measured = tuple(measured)
        self._groups: dict[int, _Group] = {}

    def threads_for(self, num_decode: int, num_prefill: int) -> int:
        """The count for a step of so many decode and prefill tokens."""
        return self._counts[self._group(num_decode + num_prefill).in_use]

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """The step that `threads_for` was last asked about took so long."""
        num_tokens = num_decode + num_prefill
        if num_tokens > 0 and seconds > 0.0:
            self._group(num_tokens).observe(seconds / num_tokens)

    def _group(self, num_tokens: int) -> _Group:
        """The group of steps of this size; a new one begins with what the nearest one has found."""
        size = (num_tokens - 1).bit_length()
        group = self._groups.get(size)
        if group is None:
            nearest = min(self._groups, key=lambda other: abs(other - size), default=None)
            chosen = self._start if nearest is None else self._groups[nearest].chosen
            group = self._groups[size] = _Group(len(self._counts), chosen, self._most(num_tokens))
        return group

    def _most(self, num_tokens: int) -> float:
        """The most a token should cost in a step of this size.

        A shorter step costs no more than a longer one, a token in a longer one no more than in a shorter.
        """
        return min((s / min(num_tokens, n) for n, s in self._measured), default=math.inf)


def fastest(counts: Sequence[int], measure: Callable[[int], float], rounds: int = 3) -> tuple[int, float]:
    """The count whose `measure` (seconds of some work) is least; of near equals the lowest.

    With it those seconds (their median). Each count is measured once a round, so that a passing
    disturbance meets all of them. `counts` ascend: beside a busy neighbour one step with too many
    threads may take seconds, so a count that costs far more than a lower one
    in the first round is not measured again.
    """
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in [*seconds]:
            is_first = not seconds[count]
            seconds[count].append(measure(count))
            lower = [seconds[other][0] for other in seconds if other < count]
            if is_first and lower and seconds[count][0] > _COLLAPSE * min(lower):
                del seconds[count]
    median = {count: statistics.median(times) for count, times in seconds.items()}
    best = min(count for count in seconds if median[count] <= _EVEN * min(median.values()))
    return best, median[best]


class _Group:
    """Steps of about one size: the index of the count they use, and the trial that may replace it."""

    def __init__(self, num_counts: int, chosen: int, most: float) -> None:
        self.chosen = chosen
        self._num_counts = num_counts
        self._absurd = _ABSURD * most
        self._direction = -1  # first try fewer: being disturbed is what this is about
        self._trial: _Trial | None = None
        self._recent = self._usual = 0.0  # moving averages of the cost …
        self._num_watched = 0  # … over so many steps
        self._interval = _FIRST_TRIAL
        self._until_due = _FIRST_TRIAL  # steps until a trial begins in any case
        self._until_rested = 0  # steps until one may begin out of turn
        self._is_out_of_turn = False

    @property
    def in_use(self) -> int:
        """Index of the count for the next step."""
        return self.chosen if self._trial is None else self._trial.in_use

    def observe(self, cost: float) -> None:
        """A step at `in_use` cost so many seconds a token."""
        if self._trial is None:
            self._watch(cost)
        elif self._trial.observe(cost):
            self._conclude(self._trial)

    def _watch(self, cost: float) -> None:
        is_absurd = cost > self._absurd
        is_disturbed = is_absurd and self._num_watched == 0
        self._num_watched += 1
        self._recent += max(_FAST, 1 / self._num_watched) * (cost - self._recent)
        self._usual += max(_SLOW, 1 / self._num_watched) * (cost - self._usual)
        self._until_due -= 1
        self._until_rested -= 1
        is_disturbed |= not 1 / _DISTURBED < self._recent / self._usual < _DISTURBED
        self._is_out_of_turn = is_disturbed and self._until_rested <= 0
        if (self._until_due <= 0 or self._is_out_of_turn) and self._num_counts > 1:
            if not 0 <= self.chosen + self._direction < self._num_counts:
                self._direction = -self._direction
            cost = cost if is_absurd else self._recent
            self._trial = _Trial(self.chosen, self.chosen + self._direction, cost, is_absurd=is_absurd)

    def _conclude(self, trial: _Trial) -> None:
        self._trial = None
        self._num_watched = 0  # what steps cost before says nothing now
        if trial.is_won:
            self.chosen = trial.challenger
            self._interval = self._until_due = _FIRST_TRIAL
            return
        self._direction = -self._direction
        self._interval = min(2 * self._interval, _LAST_TRIAL)
        rest = int(trial.lost_steps / _TRIAL_SHARE)
        self._until_due = max(self._interval, rest)
        if self._is_out_of_turn:
            self._until_rested = rest


class _Trial:
    """Alternating steps with a challenger and with the count in use, challenger first."""

    def __init__(self, chosen: int, challenger: int, cost: float, *, is_absurd: bool) -> None:
        self.challenger = challenger
        self.lost_steps = 0.0  # time lost by the challenger's steps, counted in steps
        self.in_use = challenger
        self._chosen = chosen
        self._cost = cost  # what a step with the count in use cost last
        self._is_absurd = is_absurd  # that was far more than any step should
        self._is_collapse = False
        self._tried = 0.0
        self._ratios: list[float] = []

    @property
    def is_won(self) -> bool:
        if self._is_collapse:
            return True
        return len(self._ratios) == _TRIAL_PAIRS and statistics.median(self._ratios) < _BETTER

    def observe(self, cost: float) -> bool:
        """Take in the step at `in_use`. True when the trial is over."""
        if self.in_use == self.challenger:
            self._tried = cost
            self.in_use = self._chosen
            self.lost_steps += max(0.0, cost / self._cost - 1.0)
            self._is_collapse = self._is_absurd and _COLLAPSE * cost < self._cost
            return self._is_collapse or cost > _HOPELESS * self._cost
        self._cost = cost
        self._ratios.append(self._tried / cost)
        self._is_collapse = len(self._ratios) == 1 and _COLLAPSE * self._tried < cost
        self.in_use = self.challenger
        return self._is_collapse or len(self._ratios) == _TRIAL_PAIRS
