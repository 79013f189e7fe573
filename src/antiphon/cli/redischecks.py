"""What `antiphon doctor` says about a store: is it there, is it set up as a cache, is it fast enough.

Looks over the path that workers will use (kv/admin.py). Writes keys of its own for a moment, and
changes no setting: the advice holds the commands to type.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from antiphon.cli.checks import Finding
from antiphon.cli.kvoptions import AUTO, NONE
from antiphon.cli.redisserver import NoServer, find_server
from antiphon.kv import keys, redisurl
from antiphon.kv.admin import Right, ServerFacts, Speed, open_admin
from antiphon.kv.redisurl import BadStoreUrl
from antiphon.kv.store import FaultKind, StoreFault

_SUBJECT = "redis"
_MIB = 2**20
_BOUNDED = (7, 0)  # since then there is maxmemory-clients
_SLOW_RTT_S, _SLOW_BYTES_S = 5e-3, 100e6
_ACL = keys.ACL[keys.Role.KV]
_UNREACHABLE = {
    FaultKind.DENIED: "Put user and password into the URL: redis://USER:PASSWORD@HOST",
    FaultKind.FULL: "Raise maxclients, or stop clients that hold connections.",
    FaultKind.LOADING: 'It is reading its data from disk; a cache needs none: save "", appendonly no.',
}


def check_store(choice: str) -> Iterator[Finding]:
    """Findings on what `--redis` says; `choice` auto: on the server that `serve` would start."""
    if choice == NONE:
        yield Finding("ok", _SUBJECT, "none: each worker keeps its KV to itself")
    elif choice == AUTO:
        yield check_binary(_SUBJECT, "each worker keeps its KV to itself")
    else:
        yield from _check_url(choice)


def check_binary(subject: str, without: str) -> Finding:
    """Whether `serve` finds a server to start; `without` says what is so where it does not."""
    try:
        binary = find_server(os.environ.get("PATH", os.defpath))
    except NoServer as reason:
        return Finding("warn", subject, f"`antiphon serve` finds none to start: {without}", str(reason))
    return Finding("ok", subject, f"`antiphon serve` starts {binary}")


def _check_url(url: str) -> Iterator[Finding]:
    name = str(redisurl.parse(url))
    try:
        with open_admin(url) as admin:
            servers = admin.servers()
            for facts in servers:
                yield from check_server(facts, is_lone=len(servers) == 1)
            rights = admin.rights()
            yield from check_rights(rights)
            if all(right.refusal is None for right in rights if right.user == "worker"):
                yield check_speed(admin.speed())
    except BadStoreUrl as error:
        yield Finding("fail", _SUBJECT, str(error))
    except StoreFault as fault:
        advice = _UNREACHABLE.get(fault.kind, "Is it running, and does the URL name it?")
        yield Finding("fail", _SUBJECT, f"{name} cannot be used: {fault}", advice)


def check_server(facts: ServerFacts, *, is_lone: bool) -> Iterator[Finding]:
    """One server's version, role, memory, eviction and persistence."""
    yield _check_version(facts)
    name = "it" if is_lone else facts.address
    if facts.role == "slave":
        yield Finding("fail", _SUBJECT, f"{name} is a replica and takes no writes", "Name its master.")
    yield _check_memory(name, facts.max_memory_bytes)
    yield _check_policy(name, facts.policy)
    yield _check_persistence(name, facts.is_append_only, facts.save)


def check_rights(rights: Sequence[Right]) -> Iterator[Finding]:
    """Whether this login may do what workers, `antiphon kv` and we need."""
    refused = [right for right in rights if right.refusal is not None]
    for right in refused:
        text = f"{right.command} is refused, which {right.user} needs: {right.refusal}"
        yield Finding("fail" if right.user == "worker" else "warn", "redis rights", text, _ACL)
    if not refused:
        yield Finding("ok", "redis rights", "this login may do all that is needed")


def check_speed(speed: Speed) -> Finding:
    """Round trip and bandwidth of one connection."""
    text = (
        f"round trip {1e3 * speed.rtt_s:.2f} ms, a connection reads {speed.get_bytes_s / 1e6:.0f} MB/s "
        f"and writes {speed.put_bytes_s / 1e6:.0f} MB/s"
    )
    if speed.rtt_s > _SLOW_RTT_S or speed.get_bytes_s < _SLOW_BYTES_S:
        advice = (
            "Workers measure it too and compute where that is faster, so it does no harm; "
            "to gain from it bring it nearer, or keep fewer bytes: --kv-type q8_0."
        )
        return Finding("warn", "redis speed", f"slow: {text}", advice)
    return Finding("ok", "redis speed", text)


def _check_version(facts: ServerFacts) -> Finding:
    size = "" if facts.used_memory_bytes is None else f", {facts.used_memory_bytes // _MIB} MiB used"
    text = f"{facts.address}: version {facts.version}, {facts.num_keys} keys{size}"
    if _version(facts.version) >= _BOUNDED:
        return Finding("ok", _SUBJECT, text)
    text += "; it cannot bound what its clients' replies take (maxmemory-clients)"
    return Finding("warn", _SUBJECT, text, "Use version 7.0 or newer.")


def _check_memory(name: str, max_memory_bytes: int | None) -> Finding:
    if max_memory_bytes is None:
        return Finding("ok", _SUBJECT, f"{name} does not say how much memory it may take")
    if max_memory_bytes == 0:
        text = f"{name} has no limit on its memory and grows until the system ends it"
        return Finding("warn", _SUBJECT, text, "CONFIG SET maxmemory 4gb, and in its redis.conf")
    return Finding("ok", _SUBJECT, f"{name} may take {max_memory_bytes // _MIB} MiB")


def _check_policy(name: str, policy: str | None) -> Finding:
    if policy is None:
        return Finding("ok", _SUBJECT, f"{name} does not say what it evicts")
    if policy == "volatile-ttl":
        return Finding("ok", _SUBJECT, f"{name} evicts what expires first (volatile-ttl), as blocks want it")
    advice = "CONFIG SET maxmemory-policy volatile-ttl, and in its redis.conf"
    if policy == "noeviction":
        text = f"{name} refuses writes when it is full (noeviction): new blocks are lost then"
    else:
        text = f"{name} evicts by {policy}: chains of blocks lose their beginnings, and the rest is of no use"
    return Finding("warn", _SUBJECT, text, advice)


def _check_persistence(name: str, is_append_only: bool | None, save: str | None) -> Finding:
    if is_append_only or save:
        kinds = [*(["an append-only file"] if is_append_only else []), *(["snapshots"] if save else [])]
        text = f"{name} writes {' and '.join(kinds)}: disk and memory for what can be computed again"
        return Finding("warn", _SUBJECT, text, 'CONFIG SET save "" and appendonly no, and in its redis.conf')
    if is_append_only is None or save is None:
        return Finding("ok", _SUBJECT, f"{name} does not say whether it writes to disk")
    return Finding("ok", _SUBJECT, f"{name} writes nothing to disk")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))
