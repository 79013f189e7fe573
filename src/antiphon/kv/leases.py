"""Leases in the control Redis: one key a worker, which ends by itself, and a set of who has one.

Owns the commands; form and seal are core/lease.py's. All time is Redis' own: a lease is there or is
not, no two clocks are compared. Each command names one key, so the same calls serve a cluster. Reads
are bounded in number and in bytes, whatever lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from antiphon.core.lease import MAX_LEASE_BYTES, BadLease, Lease, LeaseFault, LeaseSeal, is_worker_id
from antiphon.kv.controlredis import Command, ControlFault, ControlRedis, Refusal, Reply
from antiphon.kv.keys import WORKERS_KEY, lease_key

BEAT_S = 2.0
TTL_S = 6.0
MAX_WORKERS = 16_384  # of more than so many, these are seen: any ones
_SET_TTL_MS = 60_000
_BATCH = 512


@dataclass(frozen=True, slots=True)
class Found:
    """What lies there for a worker: its lease, or why that does not count.

    `age_s`: since it was renewed, by Redis' clock.
    """

    lease: Lease | LeaseFault
    age_s: float


class Leases:
    """`secret`: what gateways and workers share. All calls raise ControlFault."""

    def __init__(self, redis: ControlRedis, secret: str) -> None:
        self._redis = redis
        self._seal = LeaseSeal(secret)

    def __str__(self) -> str:
        """Where they lie, without secrets."""
        return str(self._redis)

    async def renew(self, lease: Lease) -> None:
        """This worker has a lease from now on, for TTL_S. ValueError where it is too long."""
        ttl_ms = round(TTL_S * 1000)
        await self._all_done(
            ("SET", lease_key(lease.id), self._seal.seal(lease), "PX", ttl_ms),
            ("SADD", WORKERS_KEY, lease.id),
            ("PEXPIRE", WORKERS_KEY, _SET_TTL_MS),
        )

    async def give_up(self, worker_id: str) -> None:
        """This worker has none any more."""
        await self._all_done(("DEL", lease_key(worker_id)), ("SREM", WORKERS_KEY, worker_id))

    async def ids(self) -> list[str]:
        """Who has a lease or had one lately, in no order."""
        (members,) = await self._redis.run([("SRANDMEMBER", WORKERS_KEY, MAX_WORKERS)])
        if not isinstance(members, list):
            raise ControlFault(members.text if isinstance(members, Refusal) else "no list of workers")
        names = [member.decode("ascii", "replace") for member in members if isinstance(member, bytes)]
        return [name for name in names if is_worker_id(name)]

    async def read(self, ids: Sequence[str]) -> Mapping[str, Found | None]:
        """What lies there for each; None: nothing. Whoever cannot be asked about just now is left out."""
        found: dict[str, Found | None] = {}
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            commands: list[Command] = [
                command
                for worker_id in batch
                for command in (
                    ("GETRANGE", lease_key(worker_id), 0, MAX_LEASE_BYTES),
                    ("PTTL", lease_key(worker_id)),
                )
            ]
            replies = await self._redis.run(commands)
            for worker_id, value, ttl_ms in zip(batch, replies[::2], replies[1::2], strict=True):
                if isinstance(value, bytes):
                    found[worker_id] = self._found(worker_id, value, ttl_ms) if value else None
        return found

    async def forget(self, ids: Collection[str]) -> None:
        """These have none any more. One that renews its lease at this moment is back with its next beat."""
        if ids:
            await self._redis.run([("SREM", WORKERS_KEY, *ids)])

    async def close(self) -> None:
        """Drop every connection."""
        await self._redis.close()

    def _found(self, worker_id: str, value: bytes, ttl_ms: Reply) -> Found:
        lease: Lease | LeaseFault
        try:
            lease = self._seal.unseal(worker_id, value)
        except BadLease as error:
            lease = error.fault
        left_s = ttl_ms / 1000 if isinstance(ttl_ms, int) and ttl_ms >= 0 else 0.0
        return Found(lease, max(0.0, TTL_S - left_s))

    async def _all_done(self, *commands: Command) -> None:
        for reply in await self._redis.run(commands):
            if isinstance(reply, Refusal):
                raise ControlFault(reply.text)
