"""What the operator's commands ask of a store: walk its keys, clear them, look at the servers, measure.

Over the same URLs, sockets and protocol as the store itself, so a check tests what workers will use.
Nothing here is on a request's path. Every command that walks does so in batches, each with its own
deadline; a cluster is walked shard by shard.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from antiphon.kv import keys, resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.rediscalls import RedisCalls
from antiphon.kv.redisnodes import RedisNodes, open_nodes
from antiphon.kv.redisstore import RedisStore
from antiphon.kv.redisurl import Address
from antiphon.kv.resp import Reply
from antiphon.kv.store import FaultKind, StoreFault

_SCAN_COUNT = b"1000"
_PROBE_TTL_MS = 10_000
_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server as INFO and CONFIG GET show it; None: it does not say, or the login may not ask."""

    address: str
    version: str
    role: str
    max_memory_bytes: int | None  # 0: without limit
    used_memory_bytes: int | None
    policy: str | None  # maxmemory-policy
    num_keys: int
    num_evicted: int | None
    is_append_only: bool | None
    save: str | None  # "": no snapshots
    io_threads: int | None


@dataclass(frozen=True, slots=True)
class Right:
    """A command, who needs it, and what the server said where this login may not use it."""

    command: str
    user: str
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over a few rounds, by one connection at a time."""

    rtt_s: float
    put_bytes_s: float
    get_bytes_s: float


class StoreAdmin:
    """Use in a `with` block. Every method raises StoreFault. `timeout_s`: of each step."""

    def __init__(self, nodes: RedisNodes, timeout_s: float = 10.0) -> None:
        self._nodes = nodes
        self._calls = RedisCalls(nodes, max_calls=1)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scan(self, match: str) -> Iterator[list[str]]:
        """Keys that match a glob, some at a time; one may come twice, one that comes and goes not at all."""
        with self._calls.turn(Deadline(self._timeout_s)):
            nodes = self._nodes.all()
        for node in nodes:
            cursor = b"0"
            while True:
                reply = self._call(node, b"SCAN", cursor, b"MATCH", match.encode(), b"COUNT", _SCAN_COUNT)
                cursor, found = _page(reply)
                if found:
                    yield found
                if cursor == b"0":
                    break

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each value, without Redis' overhead; None where there is none (or an empty one)."""
        replies = self._calls.run([(b"STRLEN", name.encode()) for name in names], self._timeout_s)
        return [reply if isinstance(reply, int) and reply else None for reply in replies]

    def delete(self, names: Sequence[str]) -> int:
        """How many were there."""
        replies = self._calls.run([(b"UNLINK", name.encode()) for name in names], self._timeout_s)
        return sum(reply for reply in replies if isinstance(reply, int))

    def servers(self) -> list[ServerFacts]:
        """All servers that hold keys."""
        with self._calls.turn(Deadline(self._timeout_s)):
            nodes = self._nodes.all()
        return [self._facts(node) for node in nodes]

    def rights(self) -> list[Right]:
        """Tries each command that is needed, with a key of its own."""
        key = keys.probe_key(os.urandom(keys.PROBE_NONCE_BYTES)).encode()
        keyed = (
            ("worker", (b"SET", key, b"?", b"NX", b"PX", b"%d" % _PROBE_TTL_MS)),
            ("worker", (b"GET", key)),
            ("worker", (b"PEXPIRE", key, b"%d" % _PROBE_TTL_MS)),
            ("antiphon kv", (b"STRLEN", key)),
            ("worker", (b"UNLINK", key)),
        )
        rights = [self._right(args, user, keyed=True) for user, args in keyed]
        glob = keys.match_blocks().encode()
        rights.append(self._right((b"PING",), "worker", keyed=False))
        rights.append(
            self._right((b"SCAN", b"0", b"MATCH", glob, b"COUNT", b"1"), "antiphon kv", keyed=False)
        )
        rights.append(self._right((b"INFO", b"server"), "antiphon doctor", keyed=False))
        return rights

    def speed(self, value_bytes: int = 2**20) -> Speed:
        """Round trips and values, over the store's own path."""
        store = RedisStore(self._nodes, num_sockets=1)
        value = os.urandom(value_bytes)
        rtts, puts, gets = [], [], []
        for _ in range(_NUM_ROUNDS):
            key = keys.probe_key(os.urandom(keys.PROBE_NONCE_BYTES))
            rtts.append(store.ping(self._timeout_s))
            started_s = time.perf_counter()
            store.put(key, value, _PROBE_TTL_MS, self._timeout_s)
            puts.append(time.perf_counter() - started_s)
            run = store.get_run([key], self._timeout_s)
            store.delete([key], self._timeout_s)
            if run.fault is not None:
                raise run.fault
            gets.append(run.seconds)
        return Speed(
            statistics.median(rtts),
            value_bytes / statistics.median(puts),
            value_bytes / statistics.median(gets),
        )

    def close(self) -> None:
        self._nodes.close()

    def _call(self, node: Address, *args: bytes) -> Reply:
        return self._nodes.call(node, *args, deadline=Deadline(self._timeout_s))

    def _right(self, args: tuple[bytes, ...], user: str, *, keyed: bool) -> Right:
        refusal = None
        try:
            if keyed:
                self._calls.run([args], self._timeout_s)
            else:
                with self._calls.turn(Deadline(self._timeout_s)):
                    nodes = self._nodes.all()
                for node in nodes:
                    self._call(node, *args)
        except StoreFault as fault:
            if fault.kind in (FaultKind.TIMEOUT, FaultKind.UNREACHABLE):
                raise
            refusal = fault.detail
        return Right(args[0].decode(), user, refusal)

    def _facts(self, node: Address) -> ServerFacts:
        reply = self._call(node, b"INFO")
        if not isinstance(reply, bytes):
            raise resp.unexpected(reply, "text")
        info = _fields(reply)
        threads = self._setting(node, b"io-threads")
        return ServerFacts(
            address=str(node),
            version=info.get("valkey_version") or info.get("redis_version", "?"),
            role=info.get("role", "?"),
            max_memory_bytes=_whole(info.get("maxmemory")),
            used_memory_bytes=_whole(info.get("used_memory")),
            policy=info.get("maxmemory_policy"),
            num_keys=_num_keys(info),
            num_evicted=_whole(info.get("evicted_keys")),
            is_append_only=info["aof_enabled"] == "1" if "aof_enabled" in info else None,
            save=self._setting(node, b"save"),
            io_threads=_whole(threads),
        )

    def _setting(self, node: Address, name: bytes) -> str | None:
        """Managed servers often forbid CONFIG, or do not know it."""
        try:
            reply = self._call(node, b"CONFIG", b"GET", name)
        except StoreFault as fault:
            if fault.kind not in (FaultKind.DENIED, FaultKind.OTHER):
                raise
            return None
        match reply:
            case [bytes(), bytes(value)]:
                return value.decode("utf-8", "replace")
        return None


def open_admin(url: str) -> StoreAdmin:
    """Connects when it is first used. URLs: kv/redisurl.py. Raises BadStoreUrl."""
    return StoreAdmin(open_nodes(url))


def _page(reply: Reply) -> tuple[bytes, list[str]]:
    match reply:
        case [bytes(cursor), list(found)]:
            return cursor, [key.decode("utf-8", "replace") for key in found if isinstance(key, bytes)]
    raise resp.unexpected(reply, "a page of keys")


def _fields(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _num_keys(info: dict[str, str]) -> int:
    """From lines such as `db0:keys=3,expires=3,avg_ttl=0`."""
    counts = (value for name, value in info.items() if name[:2] == "db" and name[2:].isdigit())
    return sum(_whole(count.partition(",")[0].removeprefix("keys=")) or 0 for count in counts)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
