"""One logged-in connection to a Redis server, and the pool of those to one address.

A connection counts the replies it owes. Whoever gives one back with a reply owing, or after a fault,
gives back a closed one: no late reply ever meets another command. The pool holds what is idle and
knows what is out; how many are out is bounded by its owner, who bounds the calls at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from antiphon.kv import resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisurl import Address, Login
from antiphon.kv.resp import ErrorReply, Reply
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer, Stream


class Connection:
    """For one thread at a time, but for `shut`. Commands may be sent ahead; replies come in order."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.num_owed = 0
        self.is_open = True
        self._is_spent = False

    def send(self, args: tuple[bytes, ...], deadline: Deadline) -> None:
        """Raises StoreFault; then this connection is closed."""
        self.num_owed += 1
        try:
            self._stream.write(resp.command(*args), deadline)
        except StoreFault as fault:
            last_words = self._last_words()
            self.close()
            raise last_words or fault from None

    def receive(self, deadline: Deadline) -> Reply:
        """The reply to the oldest command that has none. Raises StoreFault; then it is closed."""
        try:
            reply = resp.read_reply(self._stream, deadline)
        except StoreFault:
            self.close()
            raise
        self.num_owed -= 1
        if isinstance(reply, ErrorReply) and reply.kind in (FaultKind.READ_ONLY, FaultKind.FULL):
            self._is_spent = True  # a replica now, behind an address that may lead elsewhere; or sent away
        return reply

    def call(self, *args: bytes, deadline: Deadline) -> Reply:
        """Send and receive, where no reply is owed."""
        self.send(args, deadline)
        return self.receive(deadline)

    def is_reusable(self) -> bool:
        """Whether it may be kept for later: open, nothing owed, still with the right server."""
        return self.is_open and self.num_owed == 0 and not self._is_spent

    def is_alive(self) -> bool:
        """Asked of a kept one: whether the server neither hung up nor said anything meanwhile."""
        return self._stream.is_silent()

    def shut(self) -> None:
        """End it from another thread."""
        self._stream.shut()

    def close(self) -> None:
        self.is_open = False
        self._stream.close()

    def _last_words(self) -> StoreFault | None:
        """What a server that would not listen said before it hung up, such as -ERR max number of clients."""
        if self._stream.is_silent():
            return None
        with contextlib.suppress(StoreFault):
            reply = resp.read_reply(self._stream, Deadline(0.001))
            if isinstance(reply, ErrorReply):
                return reply.fault()
        return None


def connect(dialer: Dialer, address: Address, login: Login, deadline: Deadline) -> Connection:
    """Logged in. Raises StoreFault."""
    connection = Connection(dialer.dial(address, deadline))
    commands: list[tuple[bytes, ...]] = []
    if login.password is not None:
        user = (login.username.encode(),) if login.username else ()
        commands.append((b"AUTH", *user, login.password.encode()))
    if login.db:
        commands.append((b"SELECT", b"%d" % login.db))
    try:
        for args in commands:
            connection.send(args, deadline)
        resp.statuses([connection.receive(deadline) for _ in commands])
    except StoreFault:
        connection.close()
        raise
    return connection


class Pool:
    """Connections to one address. Thread-safe."""

    def __init__(self, dialer: Dialer, address: Address, login: Login) -> None:
        self.address = address
        self._dialer = dialer
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._out: set[Connection] = set()
        self._is_closed = False

    def warm(self) -> Connection | None:
        """A connection that stands and is idle, if any."""
        while True:
            with self._lock:
                if self._is_closed or not self._idle:
                    return None
                connection = self._idle.pop()
                self._out.add(connection)
            if connection.is_alive():
                return connection
            self.give_back(connection, is_sound=False)

    def take(self, deadline: Deadline) -> Connection:
        """An idle one, else a new one. Raises StoreFault."""
        connection = self.warm()
        if connection is not None:
            return connection
        connection = connect(self._dialer, self.address, self._login, deadline)
        with self._lock:
            self._out.add(connection)
            is_late = self._is_closed
        if is_late:
            self.give_back(connection, is_sound=False)
            raise StoreFault(FaultKind.UNREACHABLE, "the store was closed")
        return connection

    def give_back(self, connection: Connection, *, is_sound: bool = True) -> None:
        """What was taken; kept only where it may serve again."""
        with self._lock:
            self._out.discard(connection)
            if is_sound and connection.is_reusable() and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    @contextlib.contextmanager
    def lease(self, deadline: Deadline) -> Iterator[Connection]:
        connection = self.take(deadline)
        try:
            yield connection
        finally:
            self.give_back(connection)

    def forget_idle(self) -> None:
        """Close what is idle: the server behind the address is not what it was."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def count(self) -> tuple[int, int]:
        """Idle, out."""
        with self._lock:
            return len(self._idle), len(self._out)

    def retire(self) -> None:
        """Nothing new; what is out may end its call."""
        with self._lock:
            self._is_closed = True
        self.forget_idle()

    def close(self) -> None:
        """For good. Connections that are out fail under their users, who give them back."""
        self.retire()
        with self._lock:
            for connection in self._out:
                connection.shut()
