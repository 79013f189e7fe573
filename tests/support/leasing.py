"""Leases for tests: what a worker at some address would say of itself, and where such lie."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from antiphon.core.generation import Load
from antiphon.core.lease import Lease, new_worker_id
from antiphon.core.wire import PROTOCOL
from antiphon.kv import redisurl
from antiphon.kv.controlredis import ControlRedis
from antiphon.kv.leases import Leases
from support.loopback import SECRET, worker_info


def lease(address: str, model: str = "scripted", *, draining: bool = False, **info: object) -> Lease:
    """The lease of a new worker there."""
    load = Load(0, 0, 0, 0, 8, 0, 0, draining=draining)
    said = worker_info(model, **info)
    return Lease(id=new_worker_id(), address=address, protocol=PROTOCOL, info=said, load=load)


@contextlib.asynccontextmanager
async def leases_at(url: str, secret: str = SECRET) -> AsyncIterator[Leases]:
    """The leases in this Redis."""
    leases = Leases(ControlRedis(redisurl.parse(url)), secret)
    try:
        yield leases
    finally:
        await leases.close()
