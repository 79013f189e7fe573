"""Which server holds a key: one fixed server, the master that Sentinels name, or the shards of a cluster.

A topology is learnt before the first call and again after `suspect`: after a fault that may mean the
servers changed roles. It is a hint; the servers themselves say what is theirs (READONLY, MOVED).
Reads its own servers over short-lived connections, within the deadline of the call that needs it.
"""

from __future__ import annotations

import binascii
import bisect
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from antiphon.kv import resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisconnection import connect
from antiphon.kv.redisurl import Address, Login, Mode, StoreUrl
from antiphon.kv.resp import ErrorReply, Reply
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer

_NUM_SLOTS = 16384


class Topology(Protocol):
    """Thread-safe."""

    def learn(self, deadline: Deadline) -> None:
        """Know the servers, asking only where they are not known or suspected. Raises StoreFault."""
        ...

    def node_of(self, key: bytes) -> Address:
        """The server of a key. Raises StoreFault where none is known to serve it."""
        ...

    def nodes(self) -> list[Address]:
        """All servers that hold keys, as far as they are known."""
        ...

    def suspect(self, node: Address | None) -> None:
        """Ask again before the next call; this node, if any, last."""
        ...


class SingleTopology:
    """One server, always the same."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def learn(self, deadline: Deadline) -> None:
        return

    def node_of(self, key: bytes) -> Address:
        return self._address

    def nodes(self) -> list[Address]:
        return [self._address]

    def suspect(self, node: Address | None) -> None:
        return


class SentinelTopology:
    """The master that the first Sentinel to answer names."""

    def __init__(self, dialer: Dialer, sentinels: tuple[Address, ...], master: str, login: Login) -> None:
        self._dialer = dialer
        self._sentinels = sentinels
        self._name = master
        self._login = login
        self._master: Address | None = None

    def learn(self, deadline: Deadline) -> None:
        if self._master is None:
            self._master = self._asked(deadline)

    def node_of(self, key: bytes) -> Address:
        master = self._master
        if master is None:
            raise StoreFault(FaultKind.UNREACHABLE, f"master {self._name} is being looked for")
        return master

    def nodes(self) -> list[Address]:
        master = self._master
        return [] if master is None else [master]

    def suspect(self, node: Address | None) -> None:
        self._master = None

    def _asked(self, deadline: Deadline) -> Address:
        name = self._name.encode()
        faults = []
        for number, sentinel in enumerate(self._sentinels):
            share = Deadline(deadline.left_s() / (len(self._sentinels) - number))
            try:
                reply = _ask(
                    self._dialer, sentinel, self._login, share, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name
                )
            except StoreFault as fault:
                faults.append(f"{sentinel}: {fault}")
                continue
            match reply:
                case [bytes(host), bytes(port)] if port.isdigit():
                    return Address(host.decode(), int(port))
                case ErrorReply(text):
                    faults.append(f"{sentinel}: {text}")
                case _:
                    faults.append(f"{sentinel}: knows no master {self._name}")
        raise StoreFault(FaultKind.UNREACHABLE, "; ".join(faults))


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Ranges of slots by their first slot, ascending: (first, last, node)."""

    ranges: tuple[tuple[int, int, Address], ...]

    def node_of(self, slot: int) -> Address | None:
        at = bisect.bisect_right(self.ranges, slot, key=lambda r: r[0]) - 1
        if at < 0 or slot > self.ranges[at][1]:
            return None
        return self.ranges[at][2]

    def nodes(self) -> list[Address]:
        return list(dict.fromkeys(node for _, _, node in self.ranges))


class ClusterTopology:
    """Slots as a node of the cluster sees them. Starts from the nodes in the URL."""

    def __init__(self, dialer: Dialer, seeds: tuple[Address, ...], login: Login) -> None:
        self._dialer = dialer
        self._seeds = seeds
        self._login = login
        self._lock = threading.Lock()
        self._slots = SlotMap(())
        self._is_known = False
        self._suspect: Address | None = None

    def learn(self, deadline: Deadline) -> None:
        if self._is_known:
            return
        slots = self._asked(deadline)
        with self._lock:
            self._slots, self._is_known = slots, True

    def node_of(self, key: bytes) -> Address:
        slot = slot_of(key)
        node = self._slots.node_of(slot)
        if node is None:
            raise StoreFault(FaultKind.MOVED, f"no shard serves slot {slot}")
        return node

    def nodes(self) -> list[Address]:
        return self._slots.nodes()

    def suspect(self, node: Address | None) -> None:
        with self._lock:
            self._suspect, self._is_known = node, False

    def _asked(self, deadline: Deadline) -> SlotMap:
        suspect = self._suspect
        known = sorted({*self._slots.nodes(), *self._seeds}, key=lambda node: node == suspect)
        faults = []
        for number, node in enumerate(known):
            share = Deadline(deadline.left_s() / (len(known) - number))
            try:
                reply = _ask(self._dialer, node, self._login, share, b"CLUSTER", b"SLOTS")
                return slot_map(reply, node)
            except StoreFault as fault:
                faults.append(f"{node}: {fault}")
        raise StoreFault(FaultKind.UNREACHABLE, "; ".join(faults))


def slot_of(key: bytes) -> int:
    """Of a cluster's 16384; of the part in braces, where there is one."""
    _, brace, tail = key.partition(b"{")
    if brace:
        tag, end, _ = tail.partition(b"}")
        if end and tag:
            key = tag
    return binascii.crc_hqx(key, 0) % _NUM_SLOTS


def slot_map(reply: Reply, asked: Address) -> SlotMap:
    """The reply of CLUSTER SLOTS. A node that does not know its own host is where we asked it."""
    if not isinstance(reply, list):
        raise resp.unexpected(reply, "an array of slots")
    return SlotMap(tuple(sorted(_ranges(reply, asked))))


def _ranges(reply: list[Reply], asked: Address) -> Iterable[tuple[int, int, Address]]:
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < _NUM_SLOTS:
                name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
                yield first, last, Address(name or asked.host, port)
            case _:
                raise StoreFault(FaultKind.MALFORMED, "not a range of slots")


def make_topology(url: StoreUrl, dialer: Dialer) -> Topology:
    """What a URL asks for."""
    match url.mode:
        case Mode.SINGLE:
            return SingleTopology(url.addresses[0])
        case Mode.SENTINEL:
            return SentinelTopology(dialer, url.addresses, url.master, url.sentinel_login)
        case Mode.CLUSTER:
            return ClusterTopology(dialer, url.addresses, url.login)


def _ask(dialer: Dialer, address: Address, login: Login, deadline: Deadline, *args: bytes) -> Reply:
    connection = connect(dialer, address, login, deadline)
    try:
        return connection.call(*args, deadline=deadline)
    finally:
        connection.close()
