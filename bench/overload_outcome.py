"""What the loads of `bench overload` amount to: goodput, waits for the first token, refusals, recovery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.core.generation import Priority
from bench.crowd import Told
from bench.load import percentile
from bench.report import Value, rounded

Limits = tuple[float, float, float]  # seconds to the first token, by class


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a second brought in time."""

    work_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A load and its answers. What ended from `from_s` until `until_s` counts as goodput."""

    name: str
    told: Sequence[Told]
    from_s: float
    until_s: float
    limits_s: Limits

    def due(self, from_s: float, until_s: float) -> Outcome:
        """The part of it that was due then; what ended outside counts too, as the load was stationary."""
        told = [one for one in self.told if from_s <= one.answer.at_s < until_s]
        return Outcome(self.name, told, self.from_s, self.until_s, self.limits_s)

    def of(self, is_meant: Callable[[Told], bool]) -> Outcome:
        """The part of it of some callers."""
        told = [one for one in self.told if is_meant(one)]
        return Outcome(self.name, told, self.from_s, self.until_s, self.limits_s)

    @property
    def admitted(self) -> list[Told]:
        return [one for one in self.told if one.is_admitted]

    @property
    def refused(self) -> list[Told]:
        return [one for one in self.told if one.is_refused]

    @property
    def broken(self) -> list[Told]:
        """Neither answered right nor told to come again."""
        return [one for one in self.told if one.answer.fault is not None and not one.is_refused]

    def is_in_time(self, told: Told) -> bool:
        """A right answer whose first token came as soon as its class wants it."""
        answer = told.answer
        return answer.fault is None and answer.ttft_s <= self.limits_s[told.caller.grant.priority]

    @property
    def goodput(self) -> Goodput:
        seconds = self.until_s - self.from_s
        ended = [one for one in self.told if self.from_s <= one.answer.ended_s < self.until_s]
        good = [one for one in ended if self.is_in_time(one)]
        return Goodput(sum(one.work for one in good) / seconds, len(good) / seconds)

    def ttft_s(self, rank: float) -> float:
        """A percentile of the waits for the first token, of what was admitted; endless where none came."""
        waits = [one.answer.ttft_s for one in self.admitted]
        return percentile([float("inf") if wait != wait else wait for wait in waits], rank)

    def refusal_s(self, rank: float) -> float:
        """A percentile of what a refusal takes, from the request's leaving."""
        return percentile([one.answer.ended_s - one.answer.sent_s for one in self.refused], rank)

    @property
    def lag_s(self) -> float:
        """How late the load itself was, at the 99th percentile."""
        return percentile([one.lag_s for one in self.told], 99)

    @property
    def num_without_hint(self) -> int:
        """Refusals that do not say when to come again."""
        return sum(not one.answer.headers.get(b"retry-after", b"").isdigit() for one in self.refused)

    def recovered_s(self, dropped_s: float) -> float:
        """From the drop of the load until the last request came that was refused or late."""
        bad = [one.answer.at_s for one in self.told if not self.is_in_time(one)]
        return max(0.0, max(bad, default=0.0) - dropped_s)

    def row(self) -> dict[str, Value]:
        """Medians and tails, for the table."""
        goodput = self.goodput
        return {
            "requests": len(self.told),
            "admitted": len(self.admitted),
            "refused": len(self.refused),
            "broken": len(self.broken),
            "work tokens/s in time": rounded(goodput.work_per_s),
            "requests/s in time": rounded(goodput.requests_per_s),
            "TTFT p50, s": rounded(self.ttft_s(50)),
            "TTFT p99, s": rounded(self.ttft_s(99)),
            "refusal p50, ms": rounded(1000 * self.refusal_s(50)),
            "refusal p99, ms": rounded(1000 * self.refusal_s(99)),
            "load's own lag p99, ms": rounded(1000 * self.lag_s),
        }

    def rows(self) -> dict[str, dict[str, Value]]:
        """The whole, and each class of it where there are several."""
        found = {self.name: self.row()}
        present = sorted({one.caller.grant.priority for one in self.told})
        for priority in present if len(present) > 1 else ():
            found[f"{self.name}: {priority.name.lower()}"] = self.of_class(priority).row()
        return found

    def of_class(self, priority: Priority) -> Outcome:
        """The part of it of one class."""
        return self.of(lambda one: one.caller.grant.priority is priority)

    def reasons(self) -> dict[str, int]:
        """How often each reason for a refusal was given."""
        found: dict[str, int] = {}
        for one in self.refused:
            reason = one.answer.headers.get(b"x-antiphon-dropped-reason", b"none").decode()
            found[f"{one.answer.status} {reason}"] = found.get(f"{one.answer.status} {reason}", 0) + 1
        return found
