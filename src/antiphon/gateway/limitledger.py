"""The shared counts as one gateway uses them: few round trips, none that holds up a request for long.

Owns what waits to be counted and what waits to be noted, the word on whether Redis answers, its clock and
the number of gateways. Invariants: after a fault nothing is asked for `AWAY_S`; one call counts at a time,
and takes with it all that came meanwhile; notes of one meter and slot are added up, and bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.grant import Meter
from antiphon.core.metering import counts, period_of, slot_of
from antiphon.gateway.localmeter import LocalMeter
from antiphon.kv.controlredis import ControlFault
from antiphon.kv.limitcounters import Change, Counted
from antiphon.obs.limitmetrics import LimitMetrics
from antiphon.obs.log import Logger

AWAY_S = 1.0
GREET_S = 2.0
MOST_NOTES = 10_000
_MOST_AT_ONCE = 64
_FLUSH_S = 0.05
_LAST_NOTES_S = 0.5


class SharedCounts(Protocol):
    """What is asked of the control Redis (kv/limitcounters.py). Every call raises ControlFault."""

    async def count(self, changes: Sequence[Change], before: Sequence[Change] = ()) -> list[Counted]: ...

    async def note(self, changes: Sequence[Change], stale: Mapping[str, Sequence[bytes]]) -> None: ...

    async def seed(self, meter: Meter, spent: Mapping[str, int]) -> None: ...

    async def correct(self, meter: Meter, spent: Mapping[str, int]) -> None: ...

    async def greet(self, now_s: float) -> int: ...

    async def leave(self) -> None: ...

    async def time_s(self) -> float: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits to be counted. `concurrent`: the open ones when it came, itself included."""

    meter: Meter
    tokens: int
    concurrent: int
    local: LocalMeter
    answer: asyncio.Future[tuple[Change, Counted]]


@dataclass(slots=True)
class _Note:
    """What is to be counted at one meter, in one slot."""

    meter: Meter
    slot: int | None
    local: LocalMeter
    requests: int = 0
    tokens: int = 0


class LimitLedger:
    """Of one gateway, on its event loop."""

    def __init__(self, shared: SharedCounts, metrics: LimitMetrics, clock: Clock, log: Logger) -> None:
        self.num_gateways = 1  # as last seen
        self._shared = shared
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._ahead_s: float | None = None  # Redis' clock less ours; None: not known yet
        self._away_until_s = clock.now()
        self.is_alone = False  # Redis did not answer when it was last asked
        self._asked: list[_Asked] = []
        self._counting: asyncio.Task[None] | None = None
        self._notes: dict[tuple[str, int | None], _Note] = {}
        self._stale: dict[str, Sequence[bytes]] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_due_s = 0.0  # of the loop; uvloop's handles do not always know
        self._noting: asyncio.Task[None] | None = None
        self._open: dict[str, _Note] = {}  # meters whose open requests the others were told of

    @property
    def is_away(self) -> bool:
        """Whether Redis is not asked now."""
        return self._clock.now() < self._away_until_s

    async def count(self, meter: Meter, tokens: int, local: LocalMeter) -> tuple[Change, Counted]:
        """Count a request, which `local` holds already. Raises ControlFault, and then it may be counted.

        Where whoever waits is cancelled it is not.
        """
        began_s = self._clock.now()
        answer = asyncio.get_running_loop().create_future()
        asked = _Asked(meter, tokens, local.num_open, local, answer)
        self._asked.append(asked)
        if self._counting is None:
            self._counting = asyncio.create_task(self._count_on(), name="limit counts")
        try:
            change, counted = await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # counted, and cancelled just then
                self._undo(answer.result()[0], local)
            raise
        self._metrics.count_s.observe(self._clock.now() - began_s)
        return change, counted

    async def seed(self, meter: Meter, spent: Mapping[str, int]) -> None:
        """As the shared counts'. Raises ControlFault."""
        try:
            await self._shared.seed(meter, spent)
        except ControlFault as fault:
            self._lost(fault)
            raise

    async def correct(self, meter: Meter, spent: Mapping[str, int]) -> None:
        """As the shared counts'. Raises ControlFault."""
        try:
            await self._shared.correct(meter, spent)
        except ControlFault as fault:
            self._lost(fault)
            raise

    def note(self, meter: Meter, slot: int | None, requests: int, tokens: int, local: LocalMeter) -> None:
        """Count so much in a moment, and how many are open then. `slot` None: for budgets alone."""
        place = None if slot is None or not counts(slot, slot_of(self._now_s())) else slot
        note = self._notes.get((meter.id, place))
        if note is None:
            if len(self._notes) >= MOST_NOTES:
                del self._notes[next(iter(self._notes))]
            note = self._notes[meter.id, place] = _Note(meter, place, local)
        note.meter = meter  # its limits as they are now
        note.requests += requests
        note.tokens += tokens
        self._flush_soon(_FLUSH_S if requests >= 0 else 0.0)  # who was refused is to keep nobody else out

    async def run(self) -> None:
        """Say that this gateway lives, until cancelled; then count what is left, and leave."""
        try:
            while True:
                await self._greet()
                await asyncio.sleep(GREET_S)
        finally:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            tasks = [task for task in (self._counting, self._noting) if task is not None]
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=_LAST_NOTES_S)
                for task in late:
                    task.cancel()
            with contextlib.suppress(ControlFault):  # what is left there of ours ends by itself
                await self._write_notes()
                await self._shared.leave()
            await self._shared.close()

    def _now_s(self) -> float:
        return self._clock.now() + (self._ahead_s or 0.0)

    async def _greet(self) -> None:
        try:
            await self._ask_time()
            self.num_gateways = await self._shared.greet(self._now_s())
        except ControlFault as fault:
            self._lost(fault)
        else:
            self._found()
            self._metrics.gateways.set(self.num_gateways)
        for meter_id, note in list(self._open.items()):
            if note.local.num_open:
                self._notes.setdefault((meter_id, None), replace(note))
                self._flush_soon()
            else:
                del self._open[meter_id]

    async def _ask_time(self) -> None:
        before_s = self._clock.now()
        unix_s = await self._shared.time_s()
        self._ahead_s = unix_s - (before_s + self._clock.now()) / 2

    async def _count_on(self) -> None:
        """Count all that waits, together, until nothing does."""
        try:
            while self._asked:
                batch, self._asked = self._asked[:_MOST_AT_ONCE], self._asked[_MOST_AT_ONCE:]
                await self._count_batch(batch)
        finally:
            self._counting = None

    async def _count_batch(self, batch: list[_Asked]) -> None:
        batch = [asked for asked in batch if not asked.answer.done()]  # the others were cancelled
        notes: dict[tuple[str, int | None], _Note] = {}
        try:
            if self._ahead_s is None:
                await self._ask_time()
            changes = [self._change(asked) for asked in batch]
            notes = self._take_notes({change.meter.id for change in changes})
            found = await self._shared.count(changes, self._changes_of(notes))
        except ControlFault as fault:
            self._lost(fault)
            self._put_back(notes)
            waiting, self._asked = batch + self._asked, []
            for asked in waiting:
                if not asked.answer.done():
                    asked.answer.set_exception(fault)
            return
        self._found()
        for asked, change, counted in zip(batch, changes, found, strict=True):
            if counted.stale:
                self._stale[asked.meter.id] = counted.stale
                self._flush_soon()
            if asked.answer.done():  # cancelled meanwhile
                self._undo(change, asked.local)
            else:
                asked.answer.set_result((change, counted))

    def _undo(self, change: Change, local: LocalMeter) -> None:
        assert change.slot is not None  # a request's own
        self.note(change.meter, change.slot, -change.requests, -change.tokens, local)

    def _change(self, asked: _Asked) -> Change:
        now_s, meter = self._now_s(), asked.meter
        if meter.limits.max_concurrent is not None:
            self._open[meter.id] = _Note(meter, None, asked.local)
        return Change(meter, period_of(now_s), slot_of(now_s), 1, asked.tokens, asked.concurrent, now_s)

    def _flush_soon(self, in_s: float = _FLUSH_S) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + in_s
        if self._flush_timer is not None:
            if self._flush_due_s <= due_s:
                return
            self._flush_timer.cancel()
        self._flush_due_s = due_s
        self._flush_timer = loop.call_later(in_s, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        if self.is_away or self._noting is not None:
            self._flush_soon()
        else:
            self._noting = asyncio.create_task(self._note_on(), name="limit notes")

    async def _note_on(self) -> None:
        try:
            await self._write_notes()
        except ControlFault as fault:
            self._lost(fault)
        finally:
            self._noting = None
        if self._notes or self._stale:
            self._flush_soon()

    async def _write_notes(self) -> None:
        notes, self._notes = self._notes, {}
        stale, self._stale = self._stale, {}
        if not notes and not stale:
            return
        try:
            await self._shared.note(self._changes_of(notes), stale)
        except ControlFault:
            self._put_back(notes)
            raise

    def _take_notes(self, meter_ids: set[str]) -> dict[tuple[str, int | None], _Note]:
        """What is to be noted of these meters: a request is to find what was given back before it came."""
        keys = [key for key in self._notes if key[0] in meter_ids] if self._notes else []
        return {key: self._notes.pop(key) for key in keys}

    def _changes_of(self, notes: Mapping[tuple[str, int | None], _Note]) -> list[Change]:
        now_s = self._now_s()
        period = period_of(now_s)
        return [
            Change(note.meter, period, note.slot, note.requests, note.tokens, note.local.num_open, now_s)
            for note in notes.values()
        ]

    def _put_back(self, notes: Mapping[tuple[str, int | None], _Note]) -> None:
        """Later: a budget is not to forget them."""
        for key, note in notes.items():
            known = self._notes.get(key)
            if known is not None:
                known.requests += note.requests
                known.tokens += note.tokens
            elif len(self._notes) < MOST_NOTES:
                self._notes[key] = note

    def _lost(self, fault: ControlFault) -> None:
        self._away_until_s = self._clock.now() + AWAY_S
        if not self.is_alone:
            self.is_alone = True
            self._metrics.is_alone.set(1)
            self._log.warning("limits.alone", detail=str(fault), gateways=self.num_gateways)

    def _found(self) -> None:
        self._away_until_s = self._clock.now()
        if self.is_alone:
            self.is_alone = False
            self._metrics.is_alone.set(0)
            self._log.info("limits.shared")
