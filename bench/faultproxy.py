"""A TCP proxy that spoils what a server answers: late, slow, cut, silent or wrong.

For tests and benches of everything that talks to Redis. Requests pass as they are, only slower where a
rate for them is set; replies go through the `Faults` of the moment, which may be changed while
connections are open. Delay is latency, not bandwidth: bytes leave in the order they came, each so much
later. Byte counts are per connection and count replies.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_CHUNK = 64 * 1024
_POLL_S = 0.25
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to replies, and how fast requests pass. The default does nothing."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    swallow_after: int | None = None  # bytes; then silence, the connection stays open
    reset_after: int | None = None  # bytes; then a reset
    flip_at: int | None = None  # the byte at this place is changed
    request_bytes_per_s: float | None = None


class FaultProxy:
    """Listens on `port` of the loopback; leave the `with` block to end it."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self.faults = Faults()
        self._connect = connect
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self.num_connections = 0
        self._run(self._accept)

    @classmethod
    def to_port(cls, port: int) -> Self:
        """In front of a server on the loopback."""
        return cls(lambda: socket.create_connection(("127.0.0.1", port)))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """End every connection of now."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            client.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            self.num_connections += 1
            replies: queue.Queue[tuple[float, bytes]] = queue.Queue()
            self._run(self._forward, client, server)
            self._run(self._receive, server, replies)
            self._run(self._reply, client, server, replies)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                rate = self.faults.request_bytes_per_s
                if rate is not None:
                    self._ended.wait(len(data) / rate)
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _receive(self, server: socket.socket, replies: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_CHUNK):
                replies.put((time.monotonic() + self.faults.delay_s, data))
        replies.put((0.0, b""))

    def _reply(
        self, client: socket.socket, server: socket.socket, replies: queue.Queue[tuple[float, bytes]]
    ) -> None:
        num_sent = 0
        with contextlib.suppress(OSError):
            while (item := replies.get())[1]:
                due_s, data = item
                faults = self.faults
                self._ended.wait(max(0.0, due_s - time.monotonic()))
                if faults.bytes_per_s is not None:
                    self._ended.wait(len(data) / faults.bytes_per_s)
                data, is_over = _spoilt(data, num_sent, faults)
                client.sendall(data)
                num_sent += len(data)
                if is_over and faults.reset_after is not None:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    break
        self._drop(client, server)

    def _drop(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            one.close()


def _spoilt(data: bytes, num_before: int, faults: Faults) -> tuple[bytes, bool]:
    """What of the data goes out, and whether no more may."""
    if faults.flip_at is not None and num_before <= faults.flip_at < num_before + len(data):
        place = faults.flip_at - num_before
        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    ends = [end for end in (faults.swallow_after, faults.reset_after) if end is not None]
    room = max(min(ends) - num_before, 0) if ends else len(data)
    return data[:room], room <= len(data) and bool(ends)
