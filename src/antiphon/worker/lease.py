"""Keeps this worker's lease in the control Redis, by which gateways find it.

Owns the beat. Invariants: the lease is renewed only while the engine makes progress; it says
`draining` as soon as the drain begins and is given up when it has ended; a Redis that is away, slow or
full costs a line in the log and nothing else. The form is core/lease.py's, the commands are
kv/leases.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from antiphon.core.lease import Lease, new_worker_id
from antiphon.kv.controlredis import ControlFault, ControlRedis
from antiphon.kv.leases import BEAT_S, Leases
from antiphon.kv.redisurl import StoreUrl
from antiphon.obs.log import Logger
from antiphon.obs.metrics import WorkerMetrics

_END_S = 1.0  # for the beat to be cancelled


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Where leases lie, and where gateways reach this worker (None: where it listens)."""

    url: StoreUrl
    advertise: str | None = None


class LeaseKeeper:
    """`describe` makes the lease of this moment, None where there is none to be had: the engine stands."""

    def __init__(
        self,
        leases: Leases,
        describe: Callable[[str], Lease | None],
        metrics: WorkerMetrics,
        log: Logger,
    ) -> None:
        self.worker_id = new_worker_id()
        self._renewals = metrics.lease_renewals
        self._leases = leases
        self._describe = describe
        self._log = log
        self._is_held: bool | None = None  # None: not tried yet
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Renew the lease until cancelled."""
        while True:
            try:
                await self._renew()
            except Exception:  # noqa: BLE001 - supervisor: a fault of ours costs a beat, not the lease
                self._log.exception("lease.fault")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S * (0.75 + 0.5 * random.random())):
                    await self._wake.wait()
            self._wake.clear()

    def renew_now(self) -> None:
        """There is news that should not wait for the next beat."""
        self._wake.set()

    async def give_up(self) -> None:
        """The worker is about to end. Where Redis does not hear it the lease runs out."""
        try:
            await self._leases.give_up(self.worker_id)
        except ControlFault as fault:
            self._log.warning("lease.left", reason=str(fault))

    async def _renew(self) -> None:
        lease = self._describe(self.worker_id)
        if lease is None:
            return
        try:
            await self._leases.renew(lease)
        except ControlFault as fault:
            self._renewals.labels("failed").inc()
            if self._is_held is not False:
                self._log.warning("lease.lost", reason=str(fault))  # once, not at each beat
            self._is_held = False
        else:
            self._renewals.labels("done").inc()
            if not self._is_held:
                self._log.info("lease.held", worker_id=self.worker_id, address=lease.address)
            self._is_held = True


@asynccontextmanager
async def leased(
    settings: LeaseSettings,
    secret: str,
    describe: Callable[[str], Lease | None],
    metrics: WorkerMetrics,
    log: Logger,
) -> AsyncIterator[LeaseKeeper]:
    """This worker has a lease inside the block and none after it."""
    leases = Leases(ControlRedis(settings.url), secret)
    keeper = LeaseKeeper(leases, describe, metrics, log)
    beating = asyncio.create_task(keeper.run(), name="lease")
    try:
        yield keeper
    finally:
        beating.cancel()
        await asyncio.wait([beating], timeout=_END_S)
        await keeper.give_up()
        await leases.close()
