"""Says that this gateway lives, and ends the rows of gateways that do not.

Each gateway's beat in the database changes while it lives. A gateway is dead when its beat was the same at
`READINGS_STILL` readings in a row, `BEAT_S` apart: neither a clock that jumps nor a watcher that was
stopped for a while takes a living one for dead. Should it happen all the same, that one's own word on its
rows replaces the guess made here (store/usage.py).
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from typing import Protocol

from antiphon.core.errors import StoreUnavailable
from antiphon.obs.log import Logger
from antiphon.obs.usagemetrics import UsageMetrics

BEAT_S = 10.0
READINGS_STILL = 7  # a minute from the first to the last


class Beats(Protocol):
    """What is asked of the database. Every method raises StoreUnavailable."""

    async def beat(self, gateway_id: str, at: datetime.datetime) -> None: ...

    async def beats(self) -> Mapping[str, datetime.datetime | None]: ...

    async def sweep(self, still: Mapping[str, datetime.datetime | None], at: datetime.datetime) -> int: ...


class Stillness:
    """How often in a row each beat was the same. Pure."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[datetime.datetime | None, int]] = {}

    def read(self, beats: Mapping[str, datetime.datetime | None]) -> Mapping[str, datetime.datetime | None]:
        """Take note of a reading; those that are dead by it, with their last beat."""
        seen = self._seen
        self._seen = {}
        for gateway, beat in beats.items():
            last, count = seen.get(gateway, (beat, 0))
            self._seen[gateway] = (beat, count + 1 if last == beat else 1)
        return {name: beat for name, (beat, count) in self._seen.items() if count >= READINGS_STILL}


class UsageWatch:
    """The watch that one gateway keeps."""

    def __init__(self, store: Beats, gateway_id: str, metrics: UsageMetrics, log: Logger) -> None:
        self._store = store
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._log = log
        self._stillness = Stillness()

    async def run(self, beat_s: float = BEAT_S) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except StoreUnavailable as error:
                self._log.debug("usage.watch_failed", detail=error.detail)  # the book says it aloud
            await asyncio.sleep(beat_s)

    async def look(self) -> None:
        """One beat, one reading, and what follows of it. Raises StoreUnavailable."""
        now = datetime.datetime.now(datetime.UTC)
        await self._store.beat(self._gateway_id, now)
        others = {
            name: beat for name, beat in (await self._store.beats()).items() if name != self._gateway_id
        }
        dead = self._stillness.read(others)
        if not dead:
            return
        num_swept = await self._store.sweep(dead, now)
        self._metrics.swept.inc(num_swept)
        self._log.warning("usage.swept", gateways=sorted(dead), rows=num_swept)
