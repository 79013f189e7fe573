"""A dispatcher and workers without sockets or time of their own, for machines that decide who does what when.

Links are the product's, fed with frames and emptied of messages by hand. A fake worker says of choice `c`
the tokens `c * 1000`, `c * 1000 + 1`, …: what is missing, doubled or another choice's shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeVar
from unittest import mock

import msgspec

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, Load, Role, StepOutput, Terminal, WorkerInfo, WorkerRates
from antiphon.core.wire import HEARTBEAT_S, PROTOCOL, Abort, Down, Frame, Hello, Submit, decode_down
from antiphon.router import dispatch
from antiphon.router.dispatch import Dispatcher, FailureHandling
from antiphon.router.link import LOST_AFTER_S, WorkerLink
from antiphon.router.suspicion import TICK_S
from antiphon.router.watch import Patience
from support.lines import Lines
from support.loopback import worker_info

_RATES = WorkerRates(500.0, 0.02, 0.0005, 2000.0, 0.0002)
_PER_CHOICE = 1000

T = TypeVar("T")


def token(choice: int, position: int) -> int:
    """What every worker says there."""
    return choice * _PER_CHOICE + position


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers go by a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._virtual = clock
        super().__init__()

    def time(self) -> float:
        return self._virtual.now()


@dataclass
class _Task:
    """A generation at a worker: the choices still open there, and how many tokens each has."""

    generation: Generation
    told: dict[int, int]


@dataclass
class FakeWorker:
    """One worker's side of a link."""

    link: WorkerLink
    info: WorkerInfo
    load: Load
    life: int = 0
    is_silent: bool = False
    tasks: dict[str, _Task] = field(default_factory=dict)  # by generation

    def read(self) -> None:
        """Take in all that the gateway sent."""
        outbox = self.link._outbox
        while outbox:
            self._take(decode_down(outbox.popleft()))

    def after_reading(self) -> dict[str, set[int]]:
        """The choices of each generation that would be open then."""
        twin = replace(self, tasks=deepcopy(self.tasks))
        for message in self.link._outbox:
            twin._take(decode_down(message))
        return {name: set(task.told) for name, task in twin.tasks.items()}

    def step(self, name: str, num_tokens: int, finish: Terminal | None = None) -> Iterator[StepOutput]:
        """Tokens for each open choice of a generation, the end where it is due or `finish` says so."""
        task = self.tasks[name]
        most = task.generation.sampling.max_tokens
        for choice, told in tuple(task.told.items()):
            count = 0 if task.generation.is_prefill_only else min(num_tokens, most - told)
            ids = [token(choice, told + n) for n in range(count)]
            is_all = task.generation.is_prefill_only or told + count >= most
            end = finish or (Terminal.LENGTH if is_all else None)
            if ids or end is not None:
                yield StepOutput(name, choice, told, ids, end)
            task.told[choice] = told + count
            if end is not None:
                self._forget(name, choice)

    def give_up(self, name: str, finish: Terminal, error: str) -> Iterator[StepOutput]:
        """It will not finish what is open of this generation."""
        for choice, told in tuple(self.tasks.pop(name).told.items()):
            yield StepOutput(name, choice, told, [], finish, error=error)

    def drain(self) -> None:
        """It says from now on that it is about to stop."""
        self.load = msgspec.structs.replace(self.load, draining=True)

    def give_all_back(self) -> list[StepOutput]:
        """Its time is up."""
        names = list(self.tasks)
        return [o for name in names for o in self.give_up(name, Terminal.LOST, "The worker stops.")]

    def _take(self, message: Down) -> None:
        if isinstance(message, Submit):
            generation = message.generation
            num_told = len(generation.token_ids) - generation.num_prompt_tokens
            assert generation.id not in self.tasks, "two generations of one name"
            self.tasks[generation.id] = _Task(generation, dict.fromkeys(generation.choices, num_told))
        elif isinstance(message, Abort):
            self._forget(message.generation, message.choice)

    def _forget(self, name: str, choice: int | None) -> None:
        task = self.tasks.get(name)
        if task is None:
            return
        if choice is not None:
            task.told.pop(choice, None)
        if choice is None or not task.told:
            del self.tasks[name]


class FakeFleet:
    """A dispatcher whose links, workers and clock are moved by hand; calls run within its loop."""

    def __init__(self, roles: Iterable[Role], patience: Patience) -> None:
        self.clock = VirtualClock(100.0)
        self.loop = VirtualLoop(self.clock)
        self.lines = Lines()
        roles = list(roles)
        urls = [f"http://w{number}:1" for number in range(len(roles))]
        with mock.patch.object(dispatch, "WallClock", lambda: self.clock):
            self.dispatcher = Dispatcher(
                urls, "", self.lines.logger(), draw=lambda: 0.37, failure=FailureHandling(patience)
            )
        self.workers = [
            FakeWorker(
                link,
                worker_info(
                    worker=f"w{number}", role=role, namespace="aa", max_sequences=64, num_blocks=1000
                ),
                Load(0, 4 if role is Role.DECODE else 0, 0, 0, 1000, 0, 0, rates=_RATES),
            )
            for number, (link, role) in enumerate(zip(self.dispatcher.fleet.links, roles, strict=True))
        ]
        for worker in self.workers:
            self.come_up(worker)

    def within(self, act: Callable[[], T]) -> T:
        """Do something where the loop runs, and let it do what is due."""

        async def do() -> T:
            done = act()
            for _ in range(3):
                await asyncio.sleep(0)
            return done

        return self.loop.run_until_complete(do())

    def come_up(self, worker: FakeWorker) -> None:
        """It is started, or started again, and says so."""
        worker.life += 1
        worker.is_silent = False
        worker.load = msgspec.structs.replace(worker.load, draining=False)
        self.within(lambda: worker.link._greet(Hello(PROTOCOL, worker.info, worker.life)))
        self.say(worker)

    def go_down(self, worker: FakeWorker) -> None:
        """Its connection is lost, and it with it."""
        worker.tasks.clear()
        self.within(worker.link._lose_all)

    def take_off(self, worker: FakeWorker) -> None:
        """It leaves the list of workers; its link ends with its last answer."""
        self.dispatcher.fleet.remove(worker.link.url)
        if worker.link not in self.dispatcher.fleet.links and worker.link.is_up:
            self.go_down(worker)

    def put_back(self, worker: FakeWorker) -> None:
        """It is on the list again, with the link it had where that still stands."""
        self.dispatcher.fleet.add(worker.link.url)
        (worker.link,) = [link for link in self.dispatcher.fleet.links if link.url == worker.link.url]

    def say(self, worker: FakeWorker, outputs: Iterable[StepOutput] = ()) -> None:
        """A frame of its arrives."""
        frame = Frame(list(outputs), worker.load)
        worker.link.heard_s = self.clock.now()
        self.within(lambda: worker.link._take(frame))

    def advance(self, seconds: float) -> None:
        """Time goes on: heartbeats, links lost by silence, the dispatcher's ticks."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            for worker in self.workers:
                if not worker.link.is_up:
                    continue
                silent_s = self.clock.now() - worker.link.heard_s
                if silent_s >= LOST_AFTER_S:
                    self.go_down(worker)
                elif not worker.is_silent and silent_s >= HEARTBEAT_S:
                    self.say(worker)
                elif worker.link.is_leaving:
                    self.take_off(worker)
            self.within(self.dispatcher.tick)
