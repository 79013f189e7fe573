"""Events of a stream that another server sends: bytes in, the data of whole events out.

Strict and bounded: an event that is larger than `MAX_EVENT_BYTES` is a fault, and nothing of it is kept.
Lines may end in LF, CR LF or CR, wherever the network cut them; comments and fields other than `data`
and `error` (older llama-servers send errors so) are left out. Pure; JSON is the caller's business.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 512 * 1024
_BOM = b"\xef\xbb\xbf"
_FIELDS = (b"data", b"error")


class SseFault(Exception):
    """This is no stream of events that we would read on."""


class SseParser:
    """One stream. `feed` it what arrives."""

    def __init__(self) -> None:
        self._line = bytearray()  # the one that is not complete
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._ended_in_cr = False
        self._is_first = True

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that are complete now. Raises SseFault."""
        if self._ended_in_cr and received.startswith(b"\n"):
            received = received[1:]
        if received:
            self._ended_in_cr = received.endswith(b"\r")
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ends, rest = received.split(b"\n")
        events: list[bytes] = []
        for end in ends:
            self._take(end)
            self._dispatch_or_keep(events)
        self._take(rest)
        return events

    def finish(self) -> list[bytes]:
        """The stream is over: an event that lacks only its blank line counts."""
        events: list[bytes] = []
        if self._line:
            self._dispatch_or_keep(events)
        self._dispatch_or_keep(events)
        return events

    def _take(self, part: bytes) -> None:
        self._line += part
        if len(self._line) + self._num_data_bytes > MAX_EVENT_BYTES:
            self._line.clear()
            self._data.clear()
            raise SseFault(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _dispatch_or_keep(self, events: list[bytes]) -> None:
        """A line is complete: a blank one ends an event."""
        line = bytes(self._line)
        self._line.clear()
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_BOM)
        if line:
            self._keep(line)
        elif self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._num_data_bytes = 0

    def _keep(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name in _FIELDS:
            value = value.removeprefix(b" ")
            # An `error:` line has an object of its own; as data it is the error object of the others.
            self._data.append(value if name == b"data" else b'{"error":' + value + b"}")
            self._num_data_bytes += len(value) + 1
