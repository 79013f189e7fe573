"""Bytes to and from a Redis server, each wait bounded by a deadline.

`PlainStream` lets the kernel wait for a whole value (MSG_WAITALL): it copies each byte once, straight
into the `bytes` that is handed out, in one call without the interpreter's lock; redis-py's fastest
mode needs 1.4 to 2.5 times the CPU for it (docs/benchmarks.md, kv-wire). `TlsStream` decrypts into a
buffer and copies once more. After any fault a stream's state is unknown and its owner must close it;
`shut` may be called by another thread and makes a waiting one fail. POSIX only (SO_RCVTIMEO).
"""

from __future__ import annotations

import queue
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

from antiphon.kv.deadline import Deadline
from antiphon.kv.redisurl import Address, Tls
from antiphon.kv.store import FaultKind, StoreFault

MAX_LINE_BYTES = 4096
_PEEK_BYTES = 64
_TLS_READ_BYTES = 65536
_LEAST_WAIT_S = 0.001  # a socket's timeout of 0 would be none at all
_NEARLY = 1.01

_Place = tuple[object, ...] | str
_Found = list[tuple[socket.AddressFamily, _Place]]


class Stream(Protocol):
    """One connected socket. Every method but the last three raises StoreFault."""

    def read_line(self, deadline: Deadline) -> bytes:
        """The next line without its CRLF, at most `MAX_LINE_BYTES`."""
        ...

    def read(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Exactly so many bytes."""
        ...

    def write(self, parts: Sequence[bytes], deadline: Deadline) -> None:
        """All of the parts, in order."""
        ...

    def is_silent(self) -> bool:
        """Whether the peer neither closed nor said anything that was not read."""
        ...

    def shut(self) -> None:
        """End both directions; a thread that waits in here fails at once."""
        ...

    def close(self) -> None: ...


class PlainStream:
    """TCP or unix socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket = connected
        self._armed_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # 0: not yet
        self._poll = _poll_of(connected)

    def read_line(self, deadline: Deadline) -> bytes:
        line = b""
        while True:
            ahead = self._receive(_PEEK_BYTES, socket.MSG_PEEK, deadline)
            end = ahead.find(b"\n") + 1
            line += self._receive(end or len(ahead), 0, deadline)
            if end:
                return checked_line(line)
            if len(line) > MAX_LINE_BYTES:
                raise StoreFault(FaultKind.MALFORMED, "a line without end")

    def read(self, num_bytes: int, deadline: Deadline) -> bytes:
        data = self._receive(num_bytes, socket.MSG_WAITALL, deadline) if num_bytes else b""
        while len(data) < num_bytes:  # a signal came in between, or the end
            data += self._receive(num_bytes - len(data), socket.MSG_WAITALL, deadline)
        return data

    def write(self, parts: Sequence[bytes], deadline: Deadline) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                num_sent = self._socket.sendmsg(left)
            except OSError as error:
                raise _fault_of(error, deadline) from error
            while left and num_sent >= len(left[0]):
                num_sent -= len(left.pop(0))
            if left:
                left[0] = left[0][num_sent:]

    def is_silent(self) -> bool:
        return not self._poll.poll(0)

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, num_bytes: int, flags: int, deadline: Deadline) -> bytes:
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            data = self._socket.recv(num_bytes, flags)
        except OSError as error:
            raise _fault_of(error, deadline) from error
        if not data:
            raise closed()
        return data

    def _arm(self, option: int, deadline: Deadline) -> None:
        """Bound the next system call: with MSG_WAITALL, too, the kernel counts its waits together.

        What is set already stands while it is right to a hundredth.
        """
        left_s = max(deadline.left_s(), _LEAST_WAIT_S)
        if left_s <= self._armed_s[option] <= _NEARLY * left_s:
            return
        seconds, part = divmod(left_s, 1.0)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(part * 1e6)))
        self._armed_s[option] = left_s


class TlsStream:
    """A socket that has shaken hands."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._poll = _poll_of(connected)
        self._ahead = bytearray()  # read, not handed out yet

    def read_line(self, deadline: Deadline) -> bytes:
        while not (end := self._ahead.find(b"\n") + 1):
            if len(self._ahead) > MAX_LINE_BYTES:
                raise StoreFault(FaultKind.MALFORMED, "a line without end")
            part = bytearray(_TLS_READ_BYTES)
            self._ahead += part[: self._receive(memoryview(part), deadline)]
        line = bytes(self._ahead[:end])
        del self._ahead[:end]
        return checked_line(line)

    def read(self, num_bytes: int, deadline: Deadline) -> bytes:
        data = bytearray(num_bytes)
        got = min(num_bytes, len(self._ahead))
        data[:got] = self._ahead[:got]
        del self._ahead[:got]
        view = memoryview(data)
        while got < num_bytes:
            got += self._receive(view[got:], deadline)
        return bytes(data)

    def write(self, parts: Sequence[bytes], deadline: Deadline) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                self._socket.settimeout(deadline.left_s())
                try:
                    left = left[self._socket.send(left) :]
                except OSError as error:
                    raise _fault_of(error, deadline) from error

    def is_silent(self) -> bool:
        return not self._ahead and not self._socket.pending() and not self._poll.poll(0)

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, buffer: memoryview, deadline: Deadline) -> int:
        self._socket.settimeout(deadline.left_s())
        try:
            num_bytes = self._socket.recv_into(buffer)
        except OSError as error:
            raise _fault_of(error, deadline) from error
        if not num_bytes:
            raise closed()
        return num_bytes


class Dialer:
    """Opens streams. Owns the TLS settings, read once."""

    def __init__(self, tls: Tls | None) -> None:
        """Raises OSError where a certificate cannot be read."""
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.create_default_context(cafile=tls.ca)
            if tls.certificate is not None:
                self._context.load_cert_chain(tls.certificate, tls.key)

    def dial(self, address: Address, deadline: Deadline) -> Stream:
        """Connected, and where TLS is on, verified. Raises StoreFault."""
        try:
            connected = _connected(address, deadline)
        except OSError as error:
            raise _fault_of(error, deadline) from error
        if self._context is None:
            return PlainStream(connected)
        try:
            connected.settimeout(deadline.left_s())
            return TlsStream(self._context.wrap_socket(connected, server_hostname=address.host))
        except OSError as error:
            connected.close()
            raise _fault_of(error, deadline) from error
        except StoreFault:
            connected.close()
            raise


def checked_line(line: bytes) -> bytes:
    """A line as it came, less its CRLF."""
    if not line.endswith(b"\r\n") or len(line) > MAX_LINE_BYTES:
        raise StoreFault(FaultKind.MALFORMED, "not a line of the protocol")
    return line[:-2]


def closed() -> StoreFault:
    """The peer ended the stream."""
    return StoreFault(FaultKind.UNREACHABLE, "the server closed the connection")


def _fault_of(error: OSError, deadline: Deadline) -> StoreFault:
    if isinstance(error, TimeoutError | BlockingIOError):
        return deadline.fault()
    if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
        return closed()
    return StoreFault(FaultKind.UNREACHABLE, error.strerror or str(error))


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    if address.is_unix:
        return _connected_to(socket.AF_UNIX, address.host, deadline)
    fault: OSError = OSError(f"no address for {address.host}")
    for family, place in _resolved(address, deadline):
        try:
            connected = _connected_to(family, place, deadline)
        except OSError as error:
            fault = error
            continue
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    raise fault


def _connected_to(family: socket.AddressFamily, place: _Place, deadline: Deadline) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.settimeout(deadline.left_s())
        opened.connect(place)
    except (OSError, StoreFault):
        opened.close()
        raise
    return opened


def _resolved(address: Address, deadline: Deadline) -> _Found:
    """Addresses of a host. A name is looked up on a thread of its own: a resolver keeps no deadline."""
    try:
        return _looked_up(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    answer: queue.SimpleQueue[_Found | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answer.put(_looked_up(address, 0))
        except OSError as error:
            answer.put(error)

    threading.Thread(target=look_up, name="kv-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=deadline.left_s())
    except queue.Empty:
        raise deadline.fault() from None
    if isinstance(found, OSError):
        raise found
    return found


def _looked_up(address: Address, flags: int) -> _Found:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]


def _poll_of(watched: socket.socket) -> select.poll:
    """Tells of anything to read; after the last reply that is the peer's end, or a stray reply."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return poll


def _shut(connected: socket.socket) -> None:
    try:
        # The plain socket's, so that another thread's TLS state stays untouched.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # it was closed already
