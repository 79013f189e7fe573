"""Tells workers which tenants were erased, so that they drop what they hold of them in memory.

Reads from the database who was erased lately, every `EVERY_S`. Invariants: a worker is told of each of
them once it can be reached, and once more each `REPEAT_S` for as long as an answer may have been open
when its tenant was erased, which leaves KV behind when it ends; one that was started again holds nothing,
but is told all the same. Tenants go as what their scopes begin with: workers know no ids.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterable, Sequence
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.errors import StoreUnavailable
from antiphon.core.scope import ScopeMaker
from antiphon.obs.log import Logger
from antiphon.store.tenants import Erasure

EVERY_S = 5.0
REPEAT_S = 60.0
SETTLED_S = 900.0  # no answer takes longer
LOOK_BACK = datetime.timedelta(days=1)
MOST_ERASURES = 1000


class Erasures(Protocol):
    """What is asked of the database. Raises StoreUnavailable."""

    async def erasures(self, since: datetime.datetime, most: int) -> Sequence[Erasure]: ...


class Worker(Protocol):
    """What is told of it. `life`: another one after each start of the worker."""

    @property
    def url(self) -> str: ...

    @property
    def life(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    def forget(self, tenants: Sequence[bytes]) -> bool: ...


class Workers(Protocol):
    """Those that there are."""

    @property
    def links(self) -> Iterable[Worker]: ...


class ErasureWatch:
    """The erasures that one gateway knows of. Used on its event loop alone."""

    def __init__(
        self, store: Erasures, workers: Workers, scopes: ScopeMaker, clock: Clock, log: Logger
    ) -> None:
        self._store = store
        self._workers = workers
        self._scopes = scopes
        self._clock = clock
        self._log = log
        self._known: dict[str, tuple[bytes, float]] = {}  # by erasure: the tenant's bytes, first seen when
        self._told_s: dict[tuple[str, int], dict[str, float]] = {}  # by worker and its life, by erasure
        self._is_told = False  # the log knows that the database does not answer

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Read who was erased, and tell workers what is due. A database that is away is asked later."""
        since = datetime.datetime.now(datetime.UTC) - LOOK_BACK
        try:
            self._take(await self._store.erasures(since, MOST_ERASURES))
            self._is_told = False
        except StoreUnavailable as error:
            if not self._is_told:
                self._log.warning("erasures.unavailable", detail=error.detail)
            self._is_told = True
        self._tell()

    def _take(self, erasures: Sequence[Erasure]) -> None:
        now = self._clock.now()
        for erasure in erasures:
            if erasure.id not in self._known:
                self._log.info("tenant.erased", tenant=erasure.tenant_id)
        self._known = {
            erasure.id: self._known.get(erasure.id, (self._scopes.tenant_part(erasure.tenant_id), now))
            for erasure in erasures
        }

    def _tell(self) -> None:
        told_s: dict[tuple[str, int], dict[str, float]] = {}
        now = self._clock.now()
        for worker in self._workers.links:
            if not worker.is_up:
                continue
            name = (worker.url, worker.life)
            told = {id_: when for id_, when in self._told_s.get(name, {}).items() if id_ in self._known}
            due = [id_ for id_ in self._known if self._is_due(id_, told.get(id_), now)]
            if due and worker.forget(list({self._known[id_][0] for id_ in due})):
                told.update(dict.fromkeys(due, now))
            told_s[name] = told
        self._told_s = told_s

    def _is_due(self, erasure: str, told_s: float | None, now: float) -> bool:
        if told_s is None:
            return True
        return told_s < self._known[erasure][1] + SETTLED_S and now - told_s >= REPEAT_S
