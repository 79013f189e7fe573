"""The gate, before places that a test opens: every way out of a queue, each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from antiphon.core.clock import WallClock
from antiphon.core.errors import AntiphonError, BadRequest, Busy, NoReplica
from antiphon.core.generation import Priority, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.admission import Admission
from antiphon.gateway.callers import LOCAL
from antiphon.gateway.course import Entry, Prepared, Work
from antiphon.gateway.text import Piece
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.admission import QueueBounds
from antiphon.router.room import Room


class Door:
    """Places as a test wants them."""

    def __init__(self) -> None:
        self.num_free = 0
        self.is_open = True
        self.asked: list[int] = []  # how many were running at each look
        self._tell: Callable[[str], None] = lambda model: None

    def watch(self, on_news: Callable[[str], None]) -> None:
        self._tell = on_news

    def attend_to(self, model: str) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def is_served(self, model: str) -> bool:
        return self.is_open

    def rooms(self, model: str, num_running: int) -> Iterator[Room]:
        self.asked.append(num_running)
        yield Room(self.num_free - num_running)

    news = rooms

    def say(self) -> None:
        """Something has changed."""
        self._tell("m")


class Voice:
    """A source that only knows how it was ended."""

    fingerprint = ""

    def __init__(self) -> None:
        self.ends: list[Terminal] = []

    def end(self, finish: Terminal) -> None:
        self.ends.append(finish)

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        yield []


class Hall:
    """A gate before a door, and those who came."""

    def __init__(self) -> None:
        self.door = Door()
        self.metrics = GatewayMetrics()
        self.gate = Admission(self.door, QueueBounds(), self.metrics.admission, WallClock(), lambda: 0.5)
        self.voices: list[Voice] = []

    def enter(
        self, *, error: Exception | None = None, may_wait: bool = True, num_answer_tokens: int = 10
    ) -> tuple[Entry, Account]:
        account = Account("POST", None)
        account.caller, account.priority, account.timeout_s = LOCAL, Priority.DEFAULT, 60.0

        def start() -> Voice:
            if error is not None:
                raise error
            self.voices.append(Voice())
            return self.voices[-1]

        prepared = Prepared(Work(5, num_answer_tokens, 1), start)
        return self.gate.enter("m", prepared, account, may_wait=may_wait), account

    def num_waiting(self) -> float:
        self.gate.measure()
        value = self.metrics.admission.requests.labels("m", "default")._value.get()
        assert isinstance(value, float)
        return value


@pytest.fixture
async def hall() -> Hall:
    return Hall()


async def turn() -> None:
    """Let what is due happen."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_free_place_is_taken_at_once(hall: Hall) -> None:
    """Nothing waits, and the place is counted until its answer has ended."""
    hall.door.num_free = 1
    entry, account = hall.enter()
    assert await entry.source() is hall.voices[0]
    assert account.waited_s == 0
    with pytest.raises(Busy) as caught:
        hall.enter(may_wait=False)
    assert caught.value.dropped_reason == "rejected-queue-full"
    entry.end(Terminal.ABORTED)
    entry.end(Terminal.ABORTED)
    hall.enter(may_wait=False)
    assert hall.door.asked[-1] == 0, "given back once"


async def test_an_end_makes_room_for_who_waits(hall: Hall) -> None:
    """Without any other news."""
    hall.door.num_free = 1
    first, _ = hall.enter()
    second, account = hall.enter()
    waiting = asyncio.create_task(second.source())
    await turn()
    assert not waiting.done()
    first.end(Terminal.ABORTED)
    assert await waiting is hall.voices[1]
    assert account.waited_s is not None


async def test_what_cannot_start_leaves_no_trace(hall: Hall) -> None:
    """At once or after a wait: the error is its own, the place is free again, others go on."""
    hall.door.num_free = 1
    with pytest.raises(BadRequest):
        hall.enter(error=BadRequest("no"))
    first, _ = hall.enter()
    bad, _ = hall.enter(error=BadRequest("no"))
    broken, _ = hall.enter(error=RuntimeError("a fault of ours"))
    good, _ = hall.enter()
    first.end(Terminal.ABORTED)
    for entry, kind in ((bad, BadRequest), (broken, RuntimeError)):
        with pytest.raises(kind):
            await entry.source()
        entry.end(Terminal.ABORTED)
    assert await good.source() is hall.voices[1]


async def test_a_task_that_is_cancelled_while_it_waits_leaves_the_queue(hall: Hall) -> None:
    """The server stops a request by cancelling it; its course then ends it, and nothing starts."""
    entry, _ = hall.enter()
    waiting = asyncio.create_task(entry.source())
    await turn()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    entry.end(Terminal.ABORTED)
    assert hall.num_waiting() == 0
    hall.door.num_free = 1
    hall.door.say()
    await turn()
    assert not hall.voices


async def test_a_place_that_comes_with_the_cancellation_is_given_back(hall: Hall) -> None:
    """What was started for nobody is ended."""
    entry, _ = hall.enter()
    waiting = asyncio.create_task(entry.source())
    await turn()
    hall.door.num_free = 1
    hall.door.say()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await turn()
    entry.end(Terminal.ABORTED)
    assert [voice.ends for voice in hall.voices] in ([], [[Terminal.ABORTED]])
    other, _ = hall.enter()
    assert await other.source() is hall.voices[-1]


async def test_who_is_ended_while_it_waits_hears_why(hall: Hall) -> None:
    """Out of time, or stopped: nothing was computed, and the reason says so."""
    for finish, reason in ((Terminal.DEADLINE, "rejected-expired"), (Terminal.ABORTED, "rejected-stopping")):
        entry, _ = hall.enter()
        entry.end(finish)
        with pytest.raises(AntiphonError) as caught:
            await entry.source()
        assert caught.value.dropped_reason == reason
    assert hall.num_waiting() == 0


async def test_an_echo_needs_no_place(hall: Hall) -> None:
    """Nobody computes anything for it."""
    entry, _ = hall.enter(num_answer_tokens=0)
    assert await entry.source() is hall.voices[0]
    entry.end(Terminal.ABORTED)


async def test_a_model_that_nobody_serves_is_no_place_to_wait(hall: Hall) -> None:
    """503 at once."""
    hall.door.is_open = False
    with pytest.raises(NoReplica):
        hall.enter()


async def test_after_a_short_patience_nobody_waits_for_nobody(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that wait get a 503; they are counted."""
    monkeypatch.setattr("antiphon.gateway.admission.PATIENCE_S", 0.0)
    entries = [hall.enter()[0] for _ in range(3)]
    hall.door.is_open = False
    hall.door.say()
    for entry in entries:
        with pytest.raises(NoReplica):
            await entry.source()
    count = hall.metrics.admission.rejected.labels("m", "no-replica", "default")._value.get()
    assert (count, hall.num_waiting()) == (3, 0)
