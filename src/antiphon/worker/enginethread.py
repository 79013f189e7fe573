"""The engine on a thread of its own, bridged to the event loop.

Owns the thread and its inbox. Invariants: the engine is touched by that thread alone; a step never
waits for the loop, the loop never waits for a step; what was submitted ends in exactly one terminal
output per choice even when the thread dies. Outputs of a step reach the loop in one call. With KV
tiers attached (kvbridge.py), what they deliver comes through the inbox like everything else. Which
blocks came and went in the engine is noted in the worker's directory, behind the outputs of a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from antiphon.core.blockhash import BlockHash
from antiphon.core.clock import Clock
from antiphon.core.errors import AntiphonError
from antiphon.core.generation import Generation, Load, StepOutput, Terminal
from antiphon.core.kvblock import Tier
from antiphon.engine.counters import Counters, StepReport
from antiphon.engine.engine import Engine
from antiphon.kv.events import Change, Directory
from antiphon.obs.log import Logger
from antiphon.worker.kvbridge import Command, KvBridge, KvTier

_STOPS = "The worker stops."
_LEAST_LIMIT_S, _LIMIT_STEPS, _LEAST_STEPS = 20.0, 10, 8
_IDLE_WAIT_S = 1.0  # an idle thread looks around this often, so that its pulse is fresh


@dataclass(frozen=True, slots=True)
class StepNews:
    """What the loop learns of a step."""

    outputs: list[StepOutput]
    load: Load
    counters: Counters
    step: StepReport


T = TypeVar("T")
Deliver: TypeAlias = Callable[[StepNews], None]
Build: TypeAlias = Callable[[], Engine]


class EngineThread:
    """Runs an engine. `start` once, then `submit` and `abort` from the loop; `stop` at the end."""

    def __init__(self, clock: Clock, log: Logger, *, step_limit_s: float = 120.0) -> None:
        self._clock = clock
        self._log = log
        self._step_limit_s = step_limit_s
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._pulse_s = clock.now()
        self._late: list[StepOutput] = []  # outputs that leave with the next step's, or without one
        self._num_steps = 0
        self._longest_step_s = 0.0
        self._thread: threading.Thread | None = None
        self._bridge: KvBridge | None = None
        self._directory: Directory | None = None
        self.failure: BaseException | None = None

    @property
    def is_healthy(self) -> bool:
        """The thread lives and made progress lately: a step may take its limit, not longer."""
        lives = self._thread is not None and self._thread.is_alive() and self.failure is None
        return lives and self._clock.now() - self._pulse_s < self._limit_s

    @property
    def _limit_s(self) -> float:
        """Once some steps were measured, many times the longest: a prompt's may take far longer."""
        if self._num_steps < _LEAST_STEPS:
            return self._step_limit_s
        return min(self._step_limit_s, max(_LEAST_LIMIT_S, _LIMIT_STEPS * self._longest_step_s))

    async def start(self, build: Build, deliver: Deliver) -> Engine:
        """Build the engine on the thread and run it. Raises what `build` raises.

        `deliver` is called on this loop after each step that brought something.
        """
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Engine] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(build, built, loop, deliver), name="engine", daemon=True
        )
        self._thread.start()
        return await built

    def attach(self, tier: KvTier) -> None:
        """From now on blocks come from this tier and go to it. Once, after `start`, before `submit`."""
        self._bridge = KvBridge(tier, self._post, self._late.extend, self._log)

    def report_to(self, directory: Directory) -> None:
        """From now on blocks that come and go are noted there. Once, after `start`, before `submit`."""
        self._directory = directory

    def submit(self, generation: Generation) -> None:
        """Hand a generation to the engine. A refusal comes as its output."""
        self._post(lambda engine: self._add(engine, generation))

    def abort(self, generation_id: str, choice: int | None = None) -> None:
        """End a generation, or one choice of it."""
        self._post(lambda engine: self._abort(engine, generation_id, choice))

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop the blocks of these tenants that are in no use, each by what its scopes begin with."""
        self._post(lambda engine: self._forget(engine, tenants))

    def give_back(self) -> None:
        """End all answers as lost, so that gateways carry them on elsewhere."""
        self._post(lambda engine: self._late.extend(engine.end_all(Terminal.LOST, _STOPS)))

    async def held_hashes(self) -> list[BlockHash]:
        """Hashes of the blocks in the engine, as of its next step border."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[BlockHash]] = loop.create_future()
        self._post(lambda engine: _tell(loop, _set_result, answer, engine.held_hashes()))
        return await answer

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End everything and join the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _post(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _add(self, engine: Engine, generation: Generation) -> None:
        try:
            if self._bridge is None:
                engine.add(generation)
            else:
                self._bridge.add(engine, generation)
        except AntiphonError as error:
            reason = f"{error.code}: {error.message}"
            self._late += [
                StepOutput(generation.id, choice, 0, [], Terminal.REFUSED, error=reason)
                for choice in generation.choices
            ]

    def _abort(self, engine: Engine, generation_id: str, choice: int | None) -> None:
        if self._bridge is None:
            engine.abort(generation_id, choice)
        else:
            self._bridge.abort(engine, generation_id, choice)

    def _forget(self, engine: Engine, tenants: Collection[bytes]) -> None:
        engine.forget(tenants)
        if self._bridge is not None:
            self._bridge.forget(tenants)

    def _main(
        self,
        build: Build,
        built: asyncio.Future[Engine],
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
    ) -> None:
        try:
            engine = build()
        except BaseException as error:  # noqa: BLE001 - handed to the one who awaits `start`
            self.failure = error
            _tell(loop, _set_exception, built, error)
            return
        _tell(loop, _set_result, built, engine)

        def send(outputs: list[StepOutput]) -> None:
            news = StepNews(outputs, engine.load(), replace(engine.counters), engine.last_step)
            _tell(loop, deliver, news)

        try:
            self._loop(engine, send)
            send(self._take_late() + engine.end_all(Terminal.LOST, _STOPS))
            self._copy_out(engine)
        except BaseException as error:  # noqa: BLE001 - the thread dies: every answer ends, the process is told
            self.failure = error
            self._log.critical("engine.died", exc_info=error)
            send(self._take_late() + engine.end_all(Terminal.LOST, "The engine died."))

    def _loop(self, engine: Engine, send: Callable[[list[StepOutput]], None]) -> None:
        while not self._stopping:
            self._pulse_s = self._clock.now()
            while self._inbox:
                self._inbox.popleft()(engine)
            stepped = self._step(engine) if engine.has_work else None
            late = list(self._late)
            self._late.clear()
            if stepped is not None:
                if self._bridge is not None:
                    stepped = self._bridge.hold_back(stepped)
                send(late + stepped)  # also where both are empty: the load has changed
                self._copy_out(engine)
                self._note_blocks(engine)
            elif late:
                send(late)
                self._copy_out(engine)  # of answers that were given back
            else:
                self._note_blocks(engine)
                self._wake.wait(self._idle_s(engine))
                self._wake.clear()

    def _step(self, engine: Engine) -> list[StepOutput]:
        outputs = engine.step()
        self._num_steps += 1
        self._longest_step_s = max(self._longest_step_s, self._clock.now() - self._pulse_s)
        return outputs

    def _idle_s(self, engine: Engine) -> float:
        """How long nothing will happen, if nobody sends anything."""
        due_s = engine.next_deadline_s
        return _IDLE_WAIT_S if due_s is None else min(_IDLE_WAIT_S, max(0.0, due_s - self._clock.now()))

    def _take_late(self) -> list[StepOutput]:
        """All that has not left yet, for the end."""
        if self._bridge is not None:
            self._late += self._bridge.let_go()
        late = list(self._late)
        self._late.clear()
        return late

    def _copy_out(self, engine: Engine) -> None:
        if self._bridge is not None:
            self._bridge.after_step(engine)

    def _note_blocks(self, engine: Engine) -> None:
        if self._directory is None:
            return
        changes = engine.take_hash_changes()
        if changes is None:
            self._directory.replace(Tier.ENGINE, engine.held_hashes())
        else:
            self._directory.record(Change.REMOVED, Tier.ENGINE, changes.dropped)
            self._directory.record(Change.STORED, Tier.ENGINE, changes.named)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """Call on the loop; a loop that closed meanwhile has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Engine], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
