"""Prompts that are computed on one worker before they are answered on another.

Owns the errands that are under way: a generation `<id>~p` at the prefill worker, for its prompt's KV
only, and the answer that waits for its end. Invariants: an errand is over once, whatever happens: the
prompt is computed, its worker fails or is lost, it takes too long, or the answer ends (its client left);
then the answer goes on at once, unless it has ended, and nothing of the errand is left at the worker.
Nothing that goes wrong here is an error of the answer: whoever answers computes what it does not find.

Does not decide (split.py) and does not choose where the answer goes on.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from antiphon.core.errors import BadRequest, NoReplica
from antiphon.core.generation import Generation, Terminal
from antiphon.obs.log import Logger
from antiphon.obs.metrics import FailoverMetrics
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.picker import Pick

LATE_FACTOR = 2.0  # longer than that times what was expected, and by `LATE_S`: too late
LATE_S = 1.0


class Outcome(enum.StrEnum):
    """How an errand ended."""

    COMPUTED = "computed"
    LATE = "late"
    FAILED = "failed"  # the worker was lost, or said that it will not
    DROPPED = "dropped"  # the answer ended before


@dataclass(slots=True, eq=False)
class _Errand:
    answer: Answer
    prompt: Answer  # of the generation at the prefill worker; nothing is said in it
    pick: Pick
    endings: list[Callable[[], object]] = field(default_factory=list)  # of what watches over it


class Splitter:
    """`send` submits an attempt to a pick's worker; `go_on` has an answer made, its prompt there or not."""

    def __init__(
        self,
        send: Callable[[Pick, Attempt], None],
        go_on: Callable[[Answer, Pick, Outcome], None],
        metrics: FailoverMetrics,
        log: Logger,
    ) -> None:
        self._send = send
        self._go_on = go_on
        self._metrics = metrics
        self._log = log
        self._errands: set[_Errand] = set()

    @property
    def num_open(self) -> int:
        """Answers that wait for their prompt."""
        return len(self._errands)

    def begin(self, answer: Answer, pick: Pick) -> None:
        """Have the prompt computed where `pick.prefill` says, then the answer go on.

        Raises what `go_on` raises where it is called at once.
        """
        lead = pick.prefill
        assert lead is not None
        prompt = Answer(_prompt_of(answer.generation))
        answer.route = pick.route
        try:
            self._send(Pick(lead.link, lead.num_uncached, pick.route), Attempt(prompt, prompt.generation))
        except (NoReplica, BadRequest):
            self._metrics.splits.labels(Outcome.FAILED.value).inc()
            self._go_on(answer, pick, Outcome.FAILED)
            return
        errand = _Errand(answer, prompt, pick)
        self._errands.add(errand)
        late_s = max(LATE_FACTOR * lead.seconds, lead.seconds + LATE_S)
        timer = asyncio.get_running_loop().call_later(late_s, self._settle, errand, Outcome.LATE)
        errand.endings = [
            timer.cancel,
            prompt.events.subscribe(lambda: self._look(errand)),
            answer.events.subscribe(lambda: self._look(errand)),
        ]

    def _look(self, errand: _Errand) -> None:
        if errand.answer.is_finished:
            self._settle(errand, Outcome.DROPPED)
        elif errand.prompt.is_finished:
            (last,) = errand.prompt.events.since(errand.prompt.events.next_number - 1)
            is_computed = last.finish is Terminal.LENGTH
            self._settle(errand, Outcome.COMPUTED if is_computed else Outcome.FAILED)

    def _settle(self, errand: _Errand, outcome: Outcome) -> None:
        if errand not in self._errands:
            return
        self._errands.discard(errand)
        for end in errand.endings:
            end()
        errand.prompt.abort()
        errand.answer.num_suspicions += errand.prompt.num_suspicions  # a worker died of the one or the other
        self._metrics.splits.labels(outcome.value).inc()
        if outcome in (Outcome.LATE, Outcome.FAILED):
            self._log.warning("split.failed", generation=errand.answer.generation.id, reason=outcome.value)
        if outcome is not Outcome.DROPPED:
            self._go_on(errand.answer, errand.pick, outcome)


def _prompt_of(generation: Generation) -> Generation:
    """What the prefill worker is asked for."""
    return msgspec.structs.replace(
        generation,
        id=f"{generation.id}~p",
        token_ids=generation.token_ids[: generation.num_prompt_tokens],
        messages=b"",
        n=1,
        choice=None,
        is_prefill_only=True,
    )
