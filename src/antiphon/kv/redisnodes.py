"""The servers of one store: where they are, and the connections to them.

Owns the pools, one a server. Servers that a topology no longer names lose theirs.
"""

from __future__ import annotations

import ssl
import threading

from antiphon.kv import redisurl
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisconnection import Connection, Pool
from antiphon.kv.redisurl import Address, BadStoreUrl, StoreUrl
from antiphon.kv.resp import ErrorReply, Reply
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer
from antiphon.kv.topology import Topology, make_topology

# Faults after which the servers may be others, or in other roles, than we think.
_SUSPICIOUS = {FaultKind.TIMEOUT, FaultKind.UNREACHABLE, FaultKind.READ_ONLY, FaultKind.MOVED}


class RedisNodes:
    """Thread-safe."""

    def __init__(self, url: StoreUrl, dialer: Dialer) -> None:
        self._login = url.login
        self._dialer = dialer
        self._topology: Topology = make_topology(url, dialer)
        self._lock = threading.Lock()
        self._pools: dict[Address, Pool] = {}
        self._is_closed = False

    def prepare(self, deadline: Deadline) -> None:
        """Before each call: know the servers. Raises StoreFault."""
        if self._is_closed:
            raise StoreFault(FaultKind.UNREACHABLE, "the store was closed")
        self._topology.learn(deadline)
        nodes = self._topology.nodes()
        with self._lock:
            left = [self._pools.pop(node) for node in list(self._pools) if node not in nodes]
        for pool in left:
            pool.retire()

    def node_of(self, key: bytes) -> Address:
        """Raises StoreFault."""
        return self._topology.node_of(key)

    def all(self) -> list[Address]:
        """Every server that holds keys."""
        return self._topology.nodes()

    def pool(self, node: Address) -> Pool:
        with self._lock:
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = Pool(self._dialer, node, self._login)
            if self._is_closed:
                pool.retire()
            return pool

    def blame(self, node: Address | None, fault: StoreFault) -> None:
        """Tell of a fault, so that the next call asks anew where that may help."""
        if fault.kind in _SUSPICIOUS:
            self._topology.suspect(node)
        if fault.kind is FaultKind.READ_ONLY and node is not None:
            self.pool(node).forget_idle()

    def call(self, node: Address, *args: bytes, deadline: Deadline) -> Reply:
        """One command to one server. Raises StoreFault, for error replies too."""
        try:
            with self.pool(node).lease(deadline) as connection:
                return raised(connection.call(*args, deadline=deadline))
        except StoreFault as fault:
            self.blame(node, fault)
            raise

    def ask(self, target: Address, args: tuple[bytes, ...], deadline: Deadline) -> Reply:
        """A command at the server that a key is just moving to, as an -ASK reply wants it."""
        with self.pool(target).lease(deadline) as connection:
            return _asked(connection, args, deadline)

    def num_connections(self) -> tuple[int, int]:
        """Idle, in use."""
        with self._lock:
            counts = [pool.count() for pool in self._pools.values()]
        return sum(idle for idle, _ in counts), sum(out for _, out in counts)

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()


def open_nodes(url: str) -> RedisNodes:
    """Connects to nothing yet. Raises BadStoreUrl."""
    parsed = redisurl.parse(url)
    try:
        return RedisNodes(parsed, Dialer(parsed.tls))
    except (OSError, ssl.SSLError) as error:
        raise BadStoreUrl(f"the certificates named in the store's URL cannot be used: {error}") from error


def raised(reply: Reply) -> Reply:
    """The reply, unless it is an error. Raises StoreFault."""
    if isinstance(reply, ErrorReply):
        raise reply.fault()
    return reply


def ask_target(error: ErrorReply, asked: Address) -> Address | None:
    """Where `ASK 3999 HOST:PORT` sends us, if it does."""
    words = error.text.split()
    if len(words) != 3 or words[0] != "ASK":
        return None
    host, _, port = words[2].rpartition(":")
    if not port.isdigit():
        return None
    return Address(host or asked.host, int(port))


def _asked(connection: Connection, args: tuple[bytes, ...], deadline: Deadline) -> Reply:
    connection.send((b"ASKING",), deadline)
    connection.send(args, deadline)
    raised(connection.receive(deadline))
    return connection.receive(deadline)
