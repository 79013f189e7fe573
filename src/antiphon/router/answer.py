"""One generation's answer as it arrives: a numbered log of step outputs, and the ids received.

Owned by one event loop. Links deliver through attempts (attempt.py), one reader reads; between them
stands the log, so a slow reader never holds up a link: it falls behind, and past `MAX_UNREAD` outputs
it has lost its place. Whatever happens, each choice ends in exactly one output with `finish`; after
the last one the log is closed. What comes once with a choice (`cached`, `queued_s`, `kv`) comes once,
however many workers computed it.

The ids received so far are kept, so that a lost worker's answer can be carried on elsewhere.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from antiphon.core.errors import RequestTimeout
from antiphon.core.eventlog import EventLog, EventsGone
from antiphon.core.generation import Generation, StepOutput, Terminal, WorkerInfo

if TYPE_CHECKING:
    from antiphon.router.attempt import Attempt

MAX_UNREAD = 32768  # outputs, of all choices of an answer


class ProtocolFault(Exception):
    """The worker said something that cannot be true. Its link is closed."""


class Answer:
    """The answer to one generation."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.events: EventLog[StepOutput] = EventLog(limit=MAX_UNREAD)
        self.received = [array.array("I") for _ in range(generation.n)]
        self.worker: WorkerInfo | None = None  # who computes it; who began it, once a token came
        self.attempts: list[Attempt] = []  # where it is being computed
        self.route = ""  # where it went and why, for people
        self.deadline_s: float | None = None  # by the dispatcher's clock
        self.num_moves = 0  # times some of it was given to another worker
        self.num_stalls = 0  # times it moved because its worker was silent
        self.num_suspicions = 0  # workers that died under it before it spoke there; 0 again once it speaks
        self.suspected_at: tuple[str, int] | None = None  # the last of them: its address and its life
        self._num_vain_moves = 0  # since the last token
        self._num_received_then = 0  # at the last move
        self._open = [True] * generation.n
        self._num_open = generation.n
        self._has_spoken = [False] * generation.n  # by choice: what comes once has come

    @property
    def has_started(self) -> bool:
        """Whether a token of any choice arrived."""
        return any(self.received)

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_open_choices(self) -> int:
        return self._num_open

    @property
    def num_received(self) -> int:
        """Tokens of all choices together."""
        return sum(map(len, self.received))

    def is_open(self, choice: int) -> bool:
        """Whether this choice has not ended."""
        return self._open[choice]

    def may_move(self, max_vain_moves: int) -> bool:
        """Whether fewer moves than that have brought no token."""
        return self.num_received > self._num_received_then or self._num_vain_moves < max_vain_moves

    def note_move(self) -> None:
        """Some of it is given to another worker."""
        num_received = self.num_received
        self._num_vain_moves = 1 if num_received > self._num_received_then else self._num_vain_moves + 1
        self._num_received_then = num_received
        self.num_moves += 1

    def deliver(self, output: StepOutput) -> None:
        """Take an output from the worker. Raises ProtocolFault where it contradicts what came before."""
        choice = output.choice
        if not 0 <= choice < len(self._open):
            raise ProtocolFault(f"choice {choice} of an answer with n={self.generation.n}")
        if not self._open[choice]:
            return  # ended here (abort, stop string) while the worker's frame was on its way
        self._check(output)
        try:
            self.received[choice].extend(output.ids)
        except OverflowError as error:
            raise ProtocolFault("a token id outside 32 bits") from error
        if output.cached is not None or output.queued_s is not None or output.kv is not None:
            if self._has_spoken[choice]:  # it went on at another worker
                output = msgspec.structs.replace(output, cached=None, queued_s=None, kv=None)
            self._has_spoken[choice] = True
        self._record(output)

    def end(self, finish: Terminal, choice: int | None = None, error: str | None = None) -> None:
        """End one choice, or all that are open, from this side. Safe to call again."""
        for index in range(len(self._open)) if choice is None else (choice,):
            if self._open[index]:
                position = len(self.received[index])
                self._record(StepOutput(self.generation.id, index, position, [], finish, error=error))

    def abort(
        self, choice: int | None = None, finish: Terminal = Terminal.ABORTED, error: str | None = None
    ) -> None:
        """End one choice, or all, here and at the worker. Safe to call again and after the end."""
        is_open = not self.is_finished if choice is None else self._open[choice]
        if not is_open:
            return
        self.end(finish, choice, error)
        for attempt in tuple(self.attempts):
            attempt.abort(choice)

    def _check(self, output: StepOutput) -> None:
        num_received = len(self.received[output.choice])
        num_ids = len(output.ids)
        sampling = self.generation.sampling
        if output.position != num_received:
            raise ProtocolFault(f"position {output.position} after {num_received} tokens")
        if num_received + num_ids > sampling.max_tokens:
            raise ProtocolFault("more tokens than were asked for")
        if not num_ids and output.finish is None:
            raise ProtocolFault("an output without ids that ends nothing")
        if sampling.logprobs is not None and num_ids and len(output.logprobs or ()) != num_ids:
            raise ProtocolFault("log probabilities do not match the ids")

    def _record(self, output: StepOutput) -> None:
        if output.finish is not None:
            self._open[output.choice] = False
            self._num_open -= 1
        self.events.append(output)
        if self._num_open == 0:
            self.events.close()


class Reader:
    """Hands the events of one request's answers to the one task that turns them into a response.

    A wake-up takes all that has arrived. Events read are forgotten: memory of an open stream does
    not grow with its length.
    """

    def __init__(self, answers: Sequence[Answer], *, idle_s: float) -> None:
        self._logs = [answer.events for answer in answers]
        self._numbers = [0] * len(answers)  # of the next event to read
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._last_s = self._loop.time()
        self._is_idle = False
        self._timer = self._loop.call_later(idle_s, self._look_at_clock)
        self._unsubscribe = [log.subscribe(self._wake) for log in self._logs]

    async def read(self) -> list[tuple[int, StepOutput]] | None:
        """What arrived since the last call, each with its answer's index.

        [] after `idle_s` of silence, None after the end of all answers. Raises RequestTimeout where
        the reader was so slow that outputs were dropped.
        """
        while True:
            events = self._take()
            if events:
                self._last_s = self._loop.time()
                return events
            if all(log.is_closed for log in self._logs):
                return None
            if self._is_idle:
                self._is_idle = False
                return []
            self._waiter = self._loop.create_future()
            await self._waiter

    def close(self) -> None:
        """Stop listening."""
        self._timer.cancel()
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def _take(self) -> list[tuple[int, StepOutput]]:
        events: list[tuple[int, StepOutput]] = []
        for index, log in enumerate(self._logs):
            number = self._numbers[index]
            if log.next_number > number:
                try:
                    events.extend((index, output) for output in log.since(number))
                except EventsGone:
                    raise RequestTimeout(
                        "The client reads too slowly: parts of the answer had to be dropped.",
                        code="client_too_slow",
                    ) from None
                self._numbers[index] = log.next_number
                log.forget(log.next_number)
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_at_clock(self) -> None:
        # One timer per period, not one per token: it looks back instead of being pushed ahead.
        silent_s = self._loop.time() - self._last_s
        if silent_s >= self._idle_s:
            self._is_idle = True
            self._last_s += silent_s
            silent_s = 0.0
            self._wake()
        self._timer = self._loop.call_later(self._idle_s - silent_s, self._look_at_clock)
