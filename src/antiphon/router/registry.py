"""Reads the workers' leases and lets links come and go by them.

Owns the one task that asks the control Redis. No request waits for it: it asks once a second, one call
at a time, each with a short deadline, so a Redis that is away, slow or stopped costs nothing but news:
everything known goes on. How old the last news is stands in the metrics, and in one log line when it
stops and when it comes again. A lease without the workers' seal (core/lease.py) is not believed,
counted and told. What leases mean is members.py's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest
from antiphon.core.lease import Lease, LeaseFault
from antiphon.kv.alarm import Alarm
from antiphon.kv.controlredis import ControlFault
from antiphon.kv.leases import Found, Leases
from antiphon.obs.log import Logger
from antiphon.obs.metrics import RegistryMetrics
from antiphon.router.fleet import Fleet
from antiphon.router.link import link_url
from antiphon.router.members import Change, Members

READ_EVERY_S = 1.0


class Registry:
    """`run()` reads until cancelled. `serves`: whether this gateway offers a model of this name."""

    def __init__(
        self,
        leases: Leases,
        fleet: Fleet,
        serves: Callable[[str], bool],
        metrics: RegistryMetrics,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._leases = leases
        self._fleet = fleet
        self._clock = clock
        self._log = log
        self._members = Members(serves, fixed=[link.url for link in fleet.links])
        self._alarm = Alarm(self._tell_refusal, clock)
        self._read_s = clock.now()
        self._has_news: bool | None = None  # None: not tried yet
        self._metrics = metrics
        metrics.age_s.set_function(lambda: clock.now() - self._read_s)
        metrics.workers.set_function(lambda: self._members.num_known)

    async def run(self) -> None:
        """Ends only when cancelled."""
        try:
            while True:
                try:
                    await self.read()
                except Exception:  # noqa: BLE001 - supervisor: a fault of ours costs a read, not the gateway
                    self._log.exception("registry.fault")
                await asyncio.sleep(READ_EVERY_S * (0.75 + 0.5 * random.random()))
        finally:
            await self._leases.close()

    async def read(self) -> None:
        """Look once, and do what it means."""
        up = {link.url for link in self._fleet.links if link.is_up}
        try:
            ids = await self._leases.ids()
            found = await self._leases.read(self._members.unread(ids, up))
            await self._leases.forget([worker_id for worker_id, value in found.items() if value is None])
        except ControlFault as fault:
            self._miss(str(fault))
            return
        self._news()
        self._apply(self._members.take(ids, self._believed(found), up, self._clock.now()))

    def _believed(self, found: Mapping[str, Found | None]) -> dict[str, tuple[str, Lease] | None]:
        """With the address of its link, each lease that counts; None where there is none."""
        believed: dict[str, tuple[str, Lease] | None] = {}
        for worker_id, value in found.items():
            lease = None if value is None else value.lease
            if isinstance(lease, LeaseFault):
                self._refuse(worker_id, lease)
                continue
            try:
                believed[worker_id] = None if lease is None else (link_url(lease.address), lease)
            except BadRequest:
                self._refuse(worker_id, LeaseFault.MALFORMED)
        return believed

    def _refuse(self, worker_id: str, fault: LeaseFault) -> None:
        self._alarm.ring(fault.value, worker_id)
        self._metrics.refused.labels(fault.value).inc()

    def _tell_refusal(self, reason: str, worker_id: str) -> None:
        self._log.warning("lease.refused", reason=reason, worker_id=worker_id)

    def _apply(self, change: Change) -> None:
        for url in change.add:
            self._log.info("worker.leased", worker=url)
            self._fleet.add(url)
        for url in change.remove:
            self._log.info("worker.gone", worker=url)
            self._fleet.remove(url)

    def _news(self) -> None:
        self._read_s = self._clock.now()
        if not self._has_news:
            self._log.info("registry.read", redis=str(self._leases))
        self._has_news = True
        self._metrics.reads.labels("done").inc()

    def _miss(self, reason: str) -> None:
        self._members.lost_sight()
        if self._has_news is not False:
            self._log.warning("registry.lost", redis=str(self._leases), reason=reason)
        self._has_news = False
        self._metrics.reads.labels("failed").inc()
