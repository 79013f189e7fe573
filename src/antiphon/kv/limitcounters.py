"""What keys have used, in the control Redis, for all gateways together.

One hash a meter (a key or a client token), so that a request needs one round trip to one shard::

    r<slot> t<slot>    requests and tokens that came in that slot of 5 s (core/metering.py)
    d<day> m<month> x  tokens of the day, the month, a client token's life, since counting here began
    D<day> M<month> X  those of before, as the database knows them: set once, and again after an outage
    c<gateway>         "open requests there:when that was said"

A request is counted before the counts are read, so the order in which Redis took the commands is the order
in which requests pass, and no transaction is needed: of two gateways that count at once on both sides
of a slot's border at least one sees the other. Owns commands and fields. Every call raises ControlFault, by
its deadline.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.core.grant import Meter
from antiphon.core.metering import NUM_WHOLE_SLOTS, Period, Standing, counts, slot_of
from antiphon.kv.controlredis import Command, ControlFault, ControlRedis, Refusal, Reply
from antiphon.kv.keys import GATEWAYS_KEY, limit_key

_LOOKS = 10  # at a call, one every
_LOOK_S = 0.005
_DEADLINE_S = 1.0  # of a loop that has no time even to look
GATEWAY_SILENT_S = 10.0  # from then on a gateway counts as gone
_OPEN_STALE_S = 15.0  # the same for its open requests
_WINDOW_TTL_MS = 120_000
_TOKEN_TTL_MS = 90 * 60_000  # longer than a client token lives
_BUDGET_TTL_MS = 35 * 86_400_000
_MAX_FIELDS = 4096  # more cannot be ours
_T = TypeVar("_T")
_SLOT = re.compile(rb"[rt](\d{1,12})")


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be counted of a meter. `slot`: where requests and tokens go; None: out of the window."""

    meter: Meter
    period: Period
    slot: int | None
    requests: int
    tokens: int
    concurrent: int  # open requests at this gateway, from now on
    now_s: float


@dataclass(frozen=True, slots=True)
class Counted:
    """What a meter's counts are now. Of budgets `before`: their use before counting began, by field;
    `unknown`: fields of those whose use before is not there.
    """

    standing: Standing
    before: Mapping[str, int]
    unknown: Sequence[str]
    stale: Sequence[bytes]  # fields that mean nothing any more


class LimitCounters:
    """Used by one gateway, on its event loop."""

    def __init__(self, redis: ControlRedis, gateway_id: str) -> None:
        self._redis = redis
        self._gateway_id = gateway_id

    async def count(self, changes: Sequence[Change], before: Sequence[Change] = ()) -> list[Counted]:
        """Count these and read what is counted then, each for itself; before them, what was to be noted.

        Raises ControlFault.
        """
        first = [command for change in before for command in self._commands(change)]
        groups = [[*self._commands(change), ("HGETALL", limit_key(change.meter.id))] for change in changes]
        commands = [*first, *(command for group in groups for command in group)]
        replies = await self._run(commands)
        found = []
        at = len(first)
        for change, group in zip(changes, groups, strict=True):
            found.append(self._counted(change, group, replies[at : at + len(group)]))
            at += len(group)
        return found

    async def note(self, changes: Sequence[Change], stale: Mapping[str, Sequence[bytes]]) -> None:
        """Count these, and forget what is stale, by meter id. Raises ControlFault."""
        commands = [command for change in changes for command in self._commands(change)]
        for meter_id, fields in stale.items():
            if fields:
                commands.append(("HDEL", limit_key(meter_id), *fields))
        for reply in await self._run(commands):
            if isinstance(reply, Refusal):
                raise ControlFault(reply.text)

    async def seed(self, meter: Meter, spent: Mapping[str, int]) -> None:
        """What was used before counting began, by field; who says it first counts. Raises ControlFault."""
        key = limit_key(meter.id)
        await self._run([("HSETNX", key, field, tokens) for field, tokens in spent.items()])

    async def correct(self, meter: Meter, spent: Mapping[str, int]) -> None:
        """The same where it was said already, and turned out to be more. Raises ControlFault."""
        key = limit_key(meter.id)
        await self._run([("HSET", key, field, tokens) for field, tokens in spent.items()])

    async def greet(self, now_s: float) -> int:
        """Say that this gateway lives; how many do, itself included. Raises ControlFault."""
        replies = await self._run(
            [
                ("HSET", GATEWAYS_KEY, self._gateway_id, round(now_s)),
                ("PEXPIRE", GATEWAYS_KEY, 60_000),
                ("HGETALL", GATEWAYS_KEY),
            ]
        )
        said = replies[2]
        if not isinstance(said, dict):
            raise ControlFault(said.text if isinstance(said, Refusal) else "no list of gateways")
        silent = [name for name, at in said.items() if abs(now_s - _number(at)) > GATEWAY_SILENT_S]
        if silent:
            await self._run([("HDEL", GATEWAYS_KEY, *silent)])
        return max(len(said) - len(silent), 1)

    async def leave(self) -> None:
        """This gateway ends. Raises ControlFault."""
        await self._run([("HDEL", GATEWAYS_KEY, self._gateway_id)])

    async def time_s(self) -> float:
        """Unix time by Redis' clock. Raises ControlFault."""
        return await _soon(self._redis.time_s(_DEADLINE_S))

    async def close(self) -> None:
        """Drop every connection."""
        await self._redis.close()

    async def _run(self, commands: Sequence[Command]) -> list[Reply]:
        return await _soon(self._redis.run(commands, _DEADLINE_S))

    def _commands(self, change: Change) -> list[Command]:
        meter, limits, key = change.meter, change.meter.limits, limit_key(change.meter.id)
        commands: list[Command] = []

        def add(field: str, amount: int) -> None:
            if amount:
                commands.append(("HINCRBY", key, field, amount))

        if change.slot is not None:
            add(f"r{change.slot}", change.requests)
            add(f"t{change.slot}", change.tokens)
        if limits.tokens_per_day is not None:
            add(f"d{change.period.day}", change.tokens)
        if limits.tokens_per_month is not None:
            add(f"m{change.period.month}", change.tokens)
        if meter.max_tokens is not None:
            add("x", change.tokens)
        if limits.max_concurrent is not None:
            commands.append(
                ("HSET", key, f"c{self._gateway_id}", f"{change.concurrent}:{round(change.now_s)}")
            )
        commands.append(("PEXPIRE", key, _ttl_ms(meter)))
        return commands

    def _counted(self, change: Change, group: Sequence[Command], replies: Sequence[Reply]) -> Counted:
        for reply in replies:
            if isinstance(reply, Refusal):
                raise ControlFault(reply.text)
        fields = replies[-1]
        if not isinstance(fields, dict) or len(fields) > _MAX_FIELDS:
            raise ControlFault("what lies under a limit's key is none of ours")
        exact = {  # a command's own reply stands at this request's turn; what was read later may hold others
            str(command[2]).encode(): reply
            for command, reply in zip(group, replies, strict=True)
            if command[0] == "HINCRBY" and isinstance(reply, int)
        }
        amounts = {name: _number(value) for name, value in fields.items() if not name.startswith(b"c")}
        amounts.update(exact)
        return _standing(change, amounts, _open_elsewhere(fields, change, f"c{self._gateway_id}".encode()))


async def _soon(call: Coroutine[Any, Any, _T]) -> _T:
    """What a call brings within 50 ms in which this loop could look. Raises ControlFault.

    A deadline alone would take a loop that is busy for a Redis that is away: it comes due in the same turn
    in which a reply that has long been there would be read.
    """
    task = asyncio.create_task(call)
    try:
        for _ in range(_LOOKS):
            done, _ = await asyncio.wait([task], timeout=_LOOK_S)
            if done:
                return task.result()
    finally:
        task.cancel()
    raise ControlFault(f"no answer within {1000 * _LOOKS * _LOOK_S:g} ms")


def _standing(change: Change, amounts: Mapping[bytes, int], num_elsewhere: int) -> Counted:
    now_slot = slot_of(change.now_s)
    requests: dict[int, int] = {}
    tokens: dict[int, int] = {}
    stale: list[bytes] = []
    for name, amount in amounts.items():
        match = _SLOT.fullmatch(name)
        if match is None:
            continue
        slot = int(match[1])
        if counts(slot, now_slot):
            (requests if name.startswith(b"r") else tokens)[slot] = amount
        elif abs(slot - now_slot) > NUM_WHOLE_SLOTS + 2:  # long out of the window, or of a clock that jumped
            stale.append(name)
    meter, limits = change.meter, change.meter.limits
    wanted = {
        f"D{change.period.day}": limits.tokens_per_day is not None,
        f"M{change.period.month}": limits.tokens_per_month is not None,
        "X": meter.max_tokens is not None,
    }
    before = {name: amounts.get(name.encode()) for name, is_wanted in wanted.items() if is_wanted}

    def total(field: str) -> int:
        return amounts.get(field.lower().encode(), 0) + amounts.get(field.encode(), 0)

    return Counted(
        Standing(
            now_s=change.now_s,
            requests=requests,
            tokens=tokens,
            concurrent=change.concurrent + num_elsewhere,
            day=total(f"D{change.period.day}"),
            month=total(f"M{change.period.month}"),
            total=total("X"),
        ),
        {name: tokens for name, tokens in before.items() if tokens is not None},
        [name for name, tokens in before.items() if tokens is None],
        stale,
    )


def _open_elsewhere(fields: Mapping[bytes, bytes], change: Change, own: bytes) -> int:
    """Open requests at other gateways that said so lately."""
    total = 0
    for name, value in fields.items():
        if name.startswith(b"c") and name != own:
            num_open, _, said_s = value.partition(b":")
            if abs(change.now_s - _number(said_s)) <= _OPEN_STALE_S:
                total += max(_number(num_open), 0)
    return total


def _ttl_ms(meter: Meter) -> int:
    if meter.max_tokens is not None or meter.expires_at is not None:
        return _TOKEN_TTL_MS
    has_budget = meter.limits.tokens_per_day is not None or meter.limits.tokens_per_month is not None
    return _BUDGET_TTL_MS if has_budget else _WINDOW_TTL_MS


def _number(value: bytes) -> int:
    """What is no number counts for nothing: it is none of ours."""
    try:
        return int(value)
    except ValueError:
        return 0
