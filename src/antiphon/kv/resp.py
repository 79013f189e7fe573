"""Redis' protocol (RESP2): commands out, replies in, error replies as one `FaultKind` each.

Strict: lengths, counts and nesting are bounded before anything is allocated, and whatever is not the
protocol is a MALFORMED fault. An error reply is a whole reply: it is returned, not raised, and the
stream is still in step after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

from antiphon.kv.deadline import Deadline
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Stream

MAX_VALUE_BYTES = 16 * 2**20  # four times what a block may have
_MAX_ITEMS = 2**17
_MAX_DEPTH = 5
_JOIN_BYTES = 4096  # arguments up to here are copied together; longer ones are sent from where they lie

_KINDS = {
    "OOM": FaultKind.OUT_OF_MEMORY,
    "LOADING": FaultKind.LOADING,
    "MISCONF": FaultKind.MISCONFIGURED,
    "READONLY": FaultKind.READ_ONLY,
    "NOREPLICAS": FaultKind.READ_ONLY,
    "NOAUTH": FaultKind.DENIED,
    "NOPERM": FaultKind.DENIED,
    "WRONGPASS": FaultKind.DENIED,
    "DENIED": FaultKind.DENIED,
    "MOVED": FaultKind.MOVED,
    "ASK": FaultKind.MOVED,
    "CLUSTERDOWN": FaultKind.MOVED,
    "TRYAGAIN": FaultKind.MOVED,
}
_SENTENCES = {
    "ERR max number of clients": FaultKind.FULL,
    "ERR invalid password": FaultKind.DENIED,
    "ERR AUTH": FaultKind.DENIED,
    "ERR Client sent AUTH": FaultKind.DENIED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """A simple string, such as OK."""

    text: str


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What the server refused, in its words."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def kind(self) -> FaultKind:
        for sentence, kind in _SENTENCES.items():
            if self.text.startswith(sentence):
                return kind
        return _KINDS.get(self.code, FaultKind.OTHER)

    def fault(self) -> StoreFault:
        return StoreFault(self.kind, self.text)


Reply: TypeAlias = Union[Status, ErrorReply, int, bytes, "list[Reply]", None]


def command(*args: bytes) -> list[bytes]:
    """A command as the parts to write; a long argument is a part of its own."""
    parts: list[bytes] = []
    head = bytearray(b"*%d\r\n" % len(args))
    for arg in args:
        head += b"$%d\r\n" % len(arg)
        if len(arg) <= _JOIN_BYTES:
            head += arg
        else:
            parts += [bytes(head), arg]
            head.clear()
        head += b"\r\n"
    return [*parts, bytes(head)]


def read_reply(stream: Stream, deadline: Deadline, depth: int = 0) -> Reply:
    """The next reply. Raises StoreFault."""
    line = stream.read_line(deadline)
    sign, rest = line[:1], line[1:]
    match sign:
        case b"$":
            return _read_bulk(rest, stream, deadline)
        case b":":
            return _number(rest)
        case b"+":
            return Status(rest.decode("utf-8", "replace"))
        case b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        case b"*":
            return _read_array(rest, stream, deadline, depth)
    raise StoreFault(FaultKind.MALFORMED, f"a reply that begins with {line[:16]!r}")


def unexpected(reply: Reply, wanted: str) -> StoreFault:
    """The fault of a reply that is no error, and not what the command gives either."""
    if isinstance(reply, ErrorReply):
        return reply.fault()
    return StoreFault(FaultKind.MALFORMED, f"expected {wanted}, got {type(reply).__name__}")


def statuses(replies: Sequence[Reply]) -> None:
    """Raises StoreFault unless each of them is a simple string."""
    for reply in replies:
        if not isinstance(reply, Status):
            raise unexpected(reply, "OK")


def _read_bulk(text: bytes, stream: Stream, deadline: Deadline) -> bytes | None:
    num_bytes = _number(text)
    if num_bytes == -1:
        return None
    if not 0 <= num_bytes <= MAX_VALUE_BYTES:
        raise StoreFault(FaultKind.MALFORMED, f"a value of {num_bytes} bytes; at most {MAX_VALUE_BYTES}")
    value = stream.read(num_bytes, deadline)
    if stream.read(2, deadline) != b"\r\n":
        raise StoreFault(FaultKind.MALFORMED, "a value is longer than it said")
    return value


def _read_array(text: bytes, stream: Stream, deadline: Deadline, depth: int) -> list[Reply] | None:
    num_items = _number(text)
    if num_items == -1:
        return None
    if not 0 <= num_items <= _MAX_ITEMS or depth >= _MAX_DEPTH:
        raise StoreFault(FaultKind.MALFORMED, f"an array of {num_items} items, {depth} deep")
    return [read_reply(stream, deadline, depth + 1) for _ in range(num_items)]


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise StoreFault(FaultKind.MALFORMED, f"not a number: {text[:32]!r}")
    return int(text)
