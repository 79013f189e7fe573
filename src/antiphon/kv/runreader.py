"""Reads the values of a run of keys over several connections, in the order of the keys.

One thread, several sockets: each has up to `AHEAD` requests under way, so all servers and sockets
work at once, while replies are taken in the order of the keys: the prefix arrives from the front,
and what waits in buffers is bounded. After the first key that is missing (or refused, or
unreachable) nothing more is asked; what was asked already is read and kept in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.kv import resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisconnection import Connection, Pool
from antiphon.kv.redisurl import Address
from antiphon.kv.resp import ErrorReply
from antiphon.kv.store import StoreFault

AHEAD = 2  # more makes Redis slower, not faster: it copies each value into the connection's buffer


@dataclass(slots=True)
class Halt:
    """Why reading ended before the last key. `error`: the server's own words, where it said any."""

    index: int
    fault: StoreFault | None = None
    error: ErrorReply | None = None
    node: Address | None = None


class Lane:
    """A connection and the keys that are read over it, in order."""

    def __init__(self, pool: Pool, indices: Sequence[int]) -> None:
        self.pool = pool
        self.waiting = deque(indices)
        self.asked: deque[int] = deque()
        self._connection: Connection | None = None

    def begin(self, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Ask ahead, if a connection stands already. Raises StoreFault."""
        self._connection = self.pool.warm()
        if self._connection is not None:
            self.top_up(keys, len(keys), deadline)

    def top_up(self, keys: Sequence[bytes], end: int, deadline: Deadline) -> None:
        """Ask for the next ones before index `end`. Raises StoreFault."""
        while self.waiting and self.waiting[0] < end and len(self.asked) < AHEAD:
            if self._connection is None:
                self._connection = self.pool.take(deadline)
            self._connection.send((b"GET", keys[self.waiting[0]]), deadline)
            self.asked.append(self.waiting.popleft())

    def receive(self, deadline: Deadline) -> bytes | ErrorReply | None:
        """The value of the key that was asked first. Raises StoreFault."""
        assert self._connection is not None
        reply = self._connection.receive(deadline)
        self.asked.popleft()
        if reply is None or isinstance(reply, bytes | ErrorReply):
            return reply
        raise resp.unexpected(reply, "a value")

    def end(self) -> None:
        if self._connection is not None:
            self.pool.give_back(self._connection)


class RunReader:
    """One reading of one run. `values` is filled in place."""

    def __init__(self, keys: Sequence[bytes], values: list[bytes | None], deadline: Deadline) -> None:
        self.halt: Halt | None = None  # why it ended early, if it did
        self.fault: StoreFault | None = None  # the first, also one after the end
        self._keys = keys
        self._values = values
        self._deadline = deadline

    def read(self, lanes: Sequence[Lane]) -> None:
        """Read all keys. `lanes` hold the indices between them, each at least one, in ascending order."""
        try:
            order = sorted((index, lane) for lane in lanes for index in lane.waiting)
            for lane in lanes:
                self._begin(lane)
            for index, lane in order:
                self._read_one(index, lane)
        finally:
            for lane in lanes:
                lane.end()

    def _begin(self, lane: Lane) -> None:
        index = lane.waiting[0]
        try:
            lane.begin(self._keys, self._deadline)
        except StoreFault as fault:
            self._fail(index, lane, fault)

    def _read_one(self, index: int, lane: Lane) -> None:
        try:
            if not lane.asked:
                lane.top_up(self._keys, self._end, self._deadline)
            if not lane.asked or lane.asked[0] != index:
                return  # not asked: it lies behind the halt
            reply = lane.receive(self._deadline)
            if isinstance(reply, bytes):
                self._values[index] = reply
                lane.top_up(self._keys, self._end, self._deadline)
            elif isinstance(reply, ErrorReply):
                self._stop(Halt(index, reply.fault(), reply, lane.pool.address))
            else:
                self._stop(Halt(index))
        except StoreFault as fault:
            self._fail(index, lane, fault)

    @property
    def _end(self) -> int:
        return len(self._keys) if self.halt is None else self.halt.index

    def _fail(self, index: int, lane: Lane, fault: StoreFault) -> None:
        """A fault ends this lane and, behind this index, all of them."""
        lane.asked.clear()
        self._stop(Halt(index, fault, node=lane.pool.address))

    def _stop(self, halt: Halt) -> None:
        self.fault = self.fault or halt.fault
        if halt.index < self._end:
            self.halt = halt
