"""An attempt: choices of an answer that one worker computes, under an id of their own.

An answer begins as one attempt for all its choices. When that worker is lost, the choices that are
open go on as attempts elsewhere; a hedge is a second attempt at the same choices, its `rival`.
Invariants: a worker writes only choices of the generation it was given, and only while the attempt
has them; the first of two rivals that speaks is the only one from then on. The link holds attempts,
the answer knows them to end them; neither chooses where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from antiphon.core.generation import Generation, StepOutput, WorkerInfo
from antiphon.router.answer import Answer, ProtocolFault


class Attempt:
    """What is open of `generation.choices` of an answer, at one worker."""

    __slots__ = (
        "_choices",
        "_send_abort",
        "answer",
        "generation",
        "has_spoken",
        "heard_s",
        "may_hedge",
        "num_tokens",
        "rival",
        "sent_s",
        "worker",
    )

    def __init__(self, answer: Answer, generation: Generation) -> None:
        self.answer = answer
        self.generation = generation
        self.worker: WorkerInfo | None = None
        self.sent_s = self.heard_s = 0.0  # when it was sent; when its worker spoke of it last
        self.may_hedge = not generation.is_prefill_only  # once
        self.num_tokens = 0  # that the worker was expected to compute before it answers
        self.has_spoken = False  # this worker sent a token or an end
        self.rival: Attempt | None = None
        self._choices = set(generation.choices)
        self._send_abort: Callable[[Attempt, int | None], None] | None = None
        answer.attempts.append(self)

    @property
    def open_choices(self) -> list[int]:
        """Those that have not ended and were not taken away, in order."""
        return [choice for choice in sorted(self._choices) if self.answer.is_open(choice)]

    def has(self, choice: int) -> bool:
        """Whether this choice is open and its own."""
        return choice in self._choices and self.answer.is_open(choice)

    @property
    def num_open_choices(self) -> int:
        return len(self.open_choices)

    @property
    def is_finished(self) -> bool:
        """Whether its worker has nothing left to do."""
        return not any(self.answer.is_open(choice) for choice in self._choices)

    def attach(self, worker: WorkerInfo, send_abort: Callable[[Attempt, int | None], None]) -> None:
        """A link says that this worker has it now, and how to end it there."""
        self.worker = worker
        self._send_abort = send_abort
        if not self.answer.has_started:
            self.answer.worker = worker

    def deliver(self, output: StepOutput) -> None:
        """Take an output from the worker. Raises ProtocolFault where it cannot be true."""
        if output.choice not in self._choices:
            if output.choice in self.generation.choices:
                return  # taken away while the worker's frame was on its way
            raise ProtocolFault(f"choice {output.choice} of a generation without it")
        if not self.has_spoken:
            self._speak()
        self.answer.deliver(output)

    def take_away(self, choices: Iterable[int]) -> None:
        """These choices are somebody else's now, or nobody's."""
        self._choices.difference_update(choices)
        if not self._choices:
            self._leave()

    def drop(self) -> None:
        """End it at its worker, though the answer goes on."""
        send_abort = self._send_abort
        self.take_away(tuple(self._choices))
        if send_abort is not None:
            send_abort(self, None)

    def abort(self, choice: int | None) -> None:
        """Tell the worker that a choice, or all, ended here."""
        if self._send_abort is not None and (choice is None or choice in self._choices):
            self._send_abort(self, choice)

    def _speak(self) -> None:
        self.has_spoken = True
        self.answer.num_suspicions = 0
        rival = self.rival
        if rival is not None:
            self.rival = rival.rival = None
            if self.worker is not None and not self.answer.has_started:
                self.answer.worker = self.worker
            rival.drop()

    def _leave(self) -> None:
        if self in self.answer.attempts:
            self.answer.attempts.remove(self)
        if self.rival is not None:
            self.rival.rival = None
            self.rival = None
