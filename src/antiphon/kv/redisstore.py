"""The `BlockStore` over Redis: one server, a Sentinel-watched master or a cluster.

Needs of Redis: GET, SET, PEXPIRE, UNLINK, PING; AUTH and SELECT where the URL says so; CLUSTER SLOTS
and ASKING on a cluster. Own sockets and protocol instead of redis-py, whose fastest mode reads slower
and needs 1.4 to 2.5 times the CPU a byte (docs/benchmarks.md, kv-wire).

Connections are bounded: at most `num_sockets` a call and server, `max_calls` calls at a time. A call
that outlives its deadline drops its connections.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from antiphon.kv import resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.rediscalls import RedisCalls
from antiphon.kv.redisnodes import RedisNodes, ask_target, open_nodes, raised
from antiphon.kv.redisurl import Address
from antiphon.kv.resp import Status
from antiphon.kv.runreader import Lane, RunReader
from antiphon.kv.store import FaultKind, Run, StoreFault


class RedisStore:
    """See store.BlockStore."""

    def __init__(self, nodes: RedisNodes, num_sockets: int = 2, max_calls: int = 8) -> None:
        self._nodes = nodes
        self._num_sockets = num_sockets
        self._calls = RedisCalls(nodes, max_calls)

    def get_run(self, keys: Sequence[str], timeout_s: float) -> Run:
        started_s = time.monotonic()
        values: list[bytes | None] = [None] * len(keys)
        fault: StoreFault | None = None
        deadline = Deadline(timeout_s)
        try:
            with self._calls.turn(deadline):
                fault = self._read([key.encode() for key in keys], values, deadline)
        except StoreFault as raised_fault:
            fault = raised_fault
        return Run(values, time.monotonic() - started_s, fault)

    def put(self, key: str, value: bytes, ttl_ms: int, timeout_s: float) -> bool:
        if len(value) > resp.MAX_VALUE_BYTES:
            raise StoreFault(FaultKind.OTHER, f"a value of {len(value)} bytes is too long to be read again")
        command = (b"SET", key.encode(), value, b"NX", b"PX", b"%d" % ttl_ms)
        (reply,) = self._calls.run([command], timeout_s)
        if reply is None or isinstance(reply, Status):
            return reply is not None
        raise resp.unexpected(reply, "OK")

    def touch(self, ttls_ms: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
        commands = [(b"PEXPIRE", key.encode(), b"%d" % ttl_ms) for key, ttl_ms in ttls_ms]
        return [reply == 1 for reply in self._calls.run(commands, timeout_s)]

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        replies = self._calls.run([(b"UNLINK", key.encode()) for key in keys], timeout_s)
        return sum(reply for reply in replies if isinstance(reply, int))

    def ping(self, timeout_s: float) -> float:
        """Of all servers of a cluster: a chain's blocks lie on each of them."""
        deadline = Deadline(timeout_s)
        with self._calls.turn(deadline):
            return max([self._ping_one(node, deadline) for node in self._nodes.all()], default=0.0)

    def num_connections(self) -> tuple[int, int]:
        """Idle, in use."""
        return self._nodes.num_connections()

    def close(self) -> None:
        self._nodes.close()

    def _ping_one(self, node: Address, deadline: Deadline) -> float:
        with self._nodes.pool(node).lease(deadline) as connection:
            started_s = time.perf_counter()
            try:
                reply = raised(connection.call(b"PING", deadline=deadline))
            except StoreFault as fault:
                self._nodes.blame(node, fault)
                raise
            resp.statuses([reply])
            return time.perf_counter() - started_s

    def _read(self, keys: list[bytes], values: list[bytes | None], deadline: Deadline) -> StoreFault | None:
        """Fill `values`; the fault that ended it, if one did."""
        reader = self._read_from(0, keys, values, deadline)
        halt = reader.halt
        if halt is None or halt.error is None or halt.error.kind is not FaultKind.MOVED:
            return reader.fault
        index = halt.index
        target = ask_target(halt.error, halt.node) if halt.node is not None else None
        if target is not None:
            reply = raised(self._nodes.ask(target, (b"GET", keys[index]), deadline))
            if not isinstance(reply, bytes):
                return None
            values[index] = reply
            index += 1
        else:
            self._nodes.prepare(deadline)
        return self._read_from(index, keys, values, deadline).fault

    def _read_from(
        self, start: int, keys: list[bytes], values: list[bytes | None], deadline: Deadline
    ) -> RunReader:
        lanes, fault = self._lanes(start, keys)
        reader = RunReader(keys, values, deadline)
        reader.read(lanes)
        reader.fault = reader.fault or (fault if reader.halt is None else None)
        if reader.fault is not None:
            self._nodes.blame(reader.halt.node if reader.halt else None, reader.fault)
        return reader

    def _lanes(self, start: int, keys: list[bytes]) -> tuple[list[Lane], StoreFault | None]:
        """Who reads what from `start` on, up to the first key that no server is known for."""
        indices: dict[Address, list[int]] = {}
        fault: StoreFault | None = None
        for index in range(start, len(keys)):
            try:
                node = self._nodes.node_of(keys[index])
            except StoreFault as no_node:
                fault = no_node
                break
            indices.setdefault(node, []).append(index)
        lanes = []
        for node, of_node in indices.items():
            num_lanes = min(len(of_node), max(1, self._num_sockets // len(indices)))
            for number in range(num_lanes):
                lanes.append(Lane(self._nodes.pool(node), of_node[number::num_lanes]))
        return lanes, fault


def open_store(url: str, num_sockets: int = 2, max_calls: int = 8) -> RedisStore:
    """A store that connects when it is first used. URLs: kv/redisurl.py. Raises BadStoreUrl."""
    return RedisStore(open_nodes(url), num_sockets, max_calls)
