"""Commands on keys, each sent to the server that holds its key; the calls at a time are bounded.

A key that lies elsewhere than we thought costs one look at the servers and one retry a call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from antiphon.kv.deadline import Deadline
from antiphon.kv.redisnodes import RedisNodes, ask_target
from antiphon.kv.redisurl import Address
from antiphon.kv.resp import ErrorReply, Reply
from antiphon.kv.store import FaultKind, StoreFault

_BATCH = 128  # small commands sent before their replies are read

Command = tuple[bytes, ...]  # the key stands second


class RedisCalls:
    """Thread-safe."""

    def __init__(self, nodes: RedisNodes, max_calls: int) -> None:
        self._nodes = nodes
        self._turns = threading.Semaphore(max_calls)

    @contextlib.contextmanager
    def turn(self, deadline: Deadline) -> Iterator[None]:
        """Wait for one's turn; the servers are known then. Raises StoreFault."""
        if not self._turns.acquire(timeout=deadline.left_s()):
            raise deadline.fault()
        try:
            self._nodes.prepare(deadline)
            yield
        finally:
            self._turns.release()

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Reply]:
        """One reply a command, none of them an error. Raises StoreFault."""
        deadline = Deadline(timeout_s)
        with self.turn(deadline):
            replies = self._sent(commands, deadline)
            again = [at for at, (reply, _) in enumerate(replies) if _is_redirect(reply)]
            if again:
                self._nodes.blame(None, StoreFault(FaultKind.MOVED, "keys lie elsewhere"))
                self._nodes.prepare(deadline)
            for at in again:
                replies[at] = self._sent_again(commands[at], *replies[at], deadline)
        for reply, node in replies:
            if isinstance(reply, ErrorReply):
                self._nodes.blame(node, reply.fault())
                raise reply.fault()
        return [reply for reply, _ in replies]

    def _sent_again(
        self, command: Command, reply: Reply, node: Address, deadline: Deadline
    ) -> tuple[Reply, Address]:
        target = ask_target(reply, node) if isinstance(reply, ErrorReply) else None
        if target is not None:
            return self._nodes.ask(target, command, deadline), target
        return self._sent([command], deadline)[0]

    def _sent(self, commands: Sequence[Command], deadline: Deadline) -> list[tuple[Reply, Address]]:
        """Send each command where its key lies; replies in order, errors among them, and who said so."""
        at_node: dict[Address, list[int]] = {}
        for at, command in enumerate(commands):
            at_node.setdefault(self._nodes.node_of(command[1]), []).append(at)
        replies: dict[int, tuple[Reply, Address]] = {}
        for node, ats in at_node.items():
            try:
                with self._nodes.pool(node).lease(deadline) as connection:
                    for first in range(0, len(ats), _BATCH):
                        batch = ats[first : first + _BATCH]
                        for at in batch:
                            connection.send(commands[at], deadline)
                        for at in batch:
                            replies[at] = connection.receive(deadline), node
            except StoreFault as fault:
                self._nodes.blame(node, fault)
                raise
        return [replies[at] for at in range(len(commands))]


def _is_redirect(reply: Reply) -> bool:
    return isinstance(reply, ErrorReply) and reply.kind is FaultKind.MOVED
