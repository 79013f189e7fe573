"""What `antiphon doctor` says about the control Redis: is it there, does it keep what it is given.

Writes keys of its own for a moment, and changes no setting.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from antiphon.cli.checks import Finding
from antiphon.cli.kvoptions import AUTO, NONE
from antiphon.cli.redischecks import check_binary
from antiphon.kv import keys, redisurl
from antiphon.kv.admin import ServerFacts, open_admin
from antiphon.kv.controlredis import Command, ControlFault, ControlRedis, Refusal
from antiphon.kv.redisurl import BadStoreUrl
from antiphon.kv.store import StoreFault

_SUBJECT = "control redis"
_TIMEOUT_S = 5.0
_OLDEST = (6, 2)
_PROBE_TTL_MS = 10_000


def check_control(choice: str) -> Iterator[Finding]:
    """Findings on what `--control-redis` says; `choice` auto: on the server that `serve` would start."""
    if choice == NONE:
        yield Finding("ok", _SUBJECT, "none: gateways know the workers they are told of")
    elif choice == AUTO:
        yield check_binary(_SUBJECT, "no worker can join a run from outside")
    else:
        yield from _check_url(choice)


def _check_url(url: str) -> Iterator[Finding]:
    try:
        refusals = asyncio.run(_refusals(ControlRedis(redisurl.parse(url))))
    except (BadStoreUrl, ControlFault) as error:
        advice = "Is it running, and does the URL name it, with user and password?"
        yield Finding("fail", _SUBJECT, f"{redisurl.parse(url)} cannot be used: {error}", advice)
        return
    for command, refusal in refusals:
        yield Finding("fail", _SUBJECT, f"{command} is refused: {refusal}", keys.ACL[keys.Role.CONTROL])
    if not refusals:
        yield Finding("ok", _SUBJECT, "this login may do all that workers and gateways need")
    try:
        with open_admin(url) as admin:
            for facts in admin.servers():
                yield from check_facts(facts)
    except (BadStoreUrl, StoreFault) as error:
        yield Finding("warn", _SUBJECT, f"it does not tell of itself: {error}", keys.ACL[keys.Role.CONTROL])


def check_facts(facts: ServerFacts) -> Iterator[Finding]:
    """One server's version, role and eviction."""
    text = f"{facts.address}: version {facts.version}, {facts.num_keys} keys"
    is_new = tuple(int(part) for part in facts.version.split(".") if part.isdigit()) >= _OLDEST
    if is_new:
        yield Finding("ok", _SUBJECT, text)
    else:
        yield Finding("warn", _SUBJECT, text, f"Use version {_OLDEST[0]}.{_OLDEST[1]} or newer.")
    if facts.role == "slave":
        yield Finding(
            "fail", _SUBJECT, f"{facts.address} is a replica and takes no writes", "Name its master."
        )
    if facts.policy in (None, "noeviction"):
        yield Finding("ok", _SUBJECT, f"{facts.address} evicts nothing, as far as it says")
    else:
        advice = (
            "CONFIG SET maxmemory-policy noeviction, and in its redis.conf; KV blocks want another server"
        )
        text = f"{facts.address} evicts by {facts.policy}: workers vanish from it when it is full"
        yield Finding("warn", _SUBJECT, text, advice)


async def _refusals(redis: ControlRedis) -> list[tuple[str, str]]:
    """Each command that is needed, and what the server said where this login may not use it."""
    nonce = os.urandom(keys.PROBE_NONCE_BYTES)
    value, members, fields = (keys.control_probe_key(nonce, kind) for kind in ("value", "members", "fields"))
    commands: list[Command] = [
        ("SET", value, b"?", "PX", _PROBE_TTL_MS),
        ("GETRANGE", value, 0, 1),
        ("PTTL", value),
        ("DEL", value),
        ("SADD", members, b"?"),
        ("PEXPIRE", members, _PROBE_TTL_MS),
        ("SRANDMEMBER", members, 1),
        ("SREM", members, b"?"),
        ("HSET", fields, b"?", 1),
        ("PEXPIRE", fields, _PROBE_TTL_MS),
        ("HINCRBY", fields, b"?", 1),
        ("HSETNX", fields, b"?", 1),
        ("HGETALL", fields),
        ("HDEL", fields, b"?"),
    ]
    try:
        replies = await redis.run(commands, _TIMEOUT_S)
        refusals = [
            (str(command[0]), reply.text)
            for command, reply in zip(commands, replies, strict=True)
            if isinstance(reply, Refusal)
        ]
        try:
            await redis.time_s(_TIMEOUT_S)
        except ControlFault as error:
            refusals.append(("TIME", str(error)))
    finally:
        await redis.close()
    return refusals
