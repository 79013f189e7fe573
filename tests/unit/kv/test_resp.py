"""The protocol: what is understood, what is refused, what an error reply means."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv import resp
from antiphon.kv.deadline import Deadline
from antiphon.kv.resp import ErrorReply, Reply, Status
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import checked_line, closed


class Said:
    """A stream of bytes that were said; then its end."""

    def __init__(self, said: bytes) -> None:
        self.left = said

    def read_line(self, deadline: Deadline) -> bytes:
        line, end, self.left = self.left.partition(b"\n")
        if not end:
            raise closed()
        return checked_line(line + end)

    def read(self, num_bytes: int, deadline: Deadline) -> bytes:
        data, self.left = self.left[:num_bytes], self.left[num_bytes:]
        if len(data) < num_bytes:
            raise closed()
        return data

    def write(self, parts: Sequence[bytes], deadline: Deadline) -> None:
        raise AssertionError

    def is_silent(self) -> bool:
        return not self.left

    def shut(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def read(said: bytes) -> Reply:
    stream = Said(said)
    reply = resp.read_reply(stream, Deadline(1.0))
    assert stream.left == b""
    return reply


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (b"+OK\r\n", Status("OK")),
        (b":-12\r\n", -12),
        (b"$5\r\nhe\r\no\r\n", b"he\r\no"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"*0\r\n", []),
        (b"*3\r\n:1\r\n*1\r\n$-1\r\n-ERR no\r\n", [1, [None], ErrorReply("ERR no")]),
    ],
)
def test_replies(said: bytes, reply: Reply) -> None:
    """Each kind of reply, to its last byte."""
    assert read(said) == reply


@pytest.mark.parametrize(
    "said",
    [
        b"$99999999999999\r\n",
        b"$16777217\r\n",
        b"$-2\r\n",
        b"$1_0\r\n",
        b"$+3\r\nabc\r\n",
        b"$ 3\r\nabc\r\n",
        b"$\r\n",
        b"$3\r\nabcd\r\n",
        b"*9999999\r\n",
        b"*1\r\n" * 50,
        b":12a\r\n",
        b":99999999999999999999999\r\n",
        b"hello\r\n",
        b"\r\n",
        b"+OK\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"+" + b"x" * 5000 + b"\r\n",
    ],
)
def test_lies_are_malformed(said: bytes) -> None:
    """Lengths, counts and depths are bounded before anything is taken; numbers are digits."""
    with pytest.raises(StoreFault) as raised:
        read(said)
    assert raised.value.kind is FaultKind.MALFORMED


@given(
    said=st.binary(max_size=60)
    | st.lists(st.sampled_from([b"$3\r\n", b"*2\r\n", b":1\r\n", b"abc\r\n"])).map(b"".join)
)
def test_any_bytes_are_a_reply_or_a_fault(said: bytes) -> None:
    """Nothing a server says raises anything but a StoreFault."""
    try:
        resp.read_reply(Said(said), Deadline(1.0))
    except StoreFault as fault:
        assert fault.kind in (FaultKind.MALFORMED, FaultKind.UNREACHABLE)


@given(args=st.lists(st.binary(max_size=40) | st.just(b"v" * 5000), min_size=1, max_size=8).map(tuple))
def test_a_command_is_an_array_of_its_arguments(args: tuple[bytes, ...]) -> None:
    """What is sent reads as the arguments; a long one is sent from where it lies."""
    parts = resp.command(*args)
    assert read(b"".join(parts)) == list(args)
    assert sum(part is arg for part in parts for arg in args) >= sum(len(arg) == 5000 for arg in args)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", FaultKind.OUT_OF_MEMORY),
        ("LOADING Redis is loading the dataset in memory", FaultKind.LOADING),
        ("MISCONF Redis is configured to save RDB snapshots", FaultKind.MISCONFIGURED),
        ("READONLY You can't write against a read only replica.", FaultKind.READ_ONLY),
        ("NOREPLICAS Not enough good replicas to write.", FaultKind.READ_ONLY),
        ("NOAUTH Authentication required.", FaultKind.DENIED),
        ("NOPERM this user has no permissions to run the 'set' command", FaultKind.DENIED),
        ("WRONGPASS invalid username-password pair or user is disabled.", FaultKind.DENIED),
        ("DENIED Redis is running in protected mode", FaultKind.DENIED),
        ("ERR AUTH <password> called without any password configured", FaultKind.DENIED),
        ("ERR Client sent AUTH, but no password is set", FaultKind.DENIED),
        ("ERR invalid password", FaultKind.DENIED),
        ("MOVED 3999 127.0.0.1:6381", FaultKind.MOVED),
        ("ASK 3999 127.0.0.1:6381", FaultKind.MOVED),
        ("CLUSTERDOWN Hash slot not served", FaultKind.MOVED),
        ("TRYAGAIN Multiple keys request during rehashing of slot", FaultKind.MOVED),
        ("ERR max number of clients reached", FaultKind.FULL),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", FaultKind.OTHER),
        ("ERR unknown command", FaultKind.OTHER),
        ("OOMPH", FaultKind.OTHER),
        ("", FaultKind.OTHER),
    ],
)
def test_errors_have_one_meaning(text: str, kind: FaultKind) -> None:
    """By their first word, or where Redis has none, by the sentence."""
    assert ErrorReply(text).kind is kind
    assert ErrorReply(text).fault().detail == text


def test_a_reply_of_another_kind_is_malformed() -> None:
    """An error where OK was expected is that error; a number is not the protocol."""
    resp.statuses([Status("OK"), Status("PONG")])
    for reply, kind in ((7, FaultKind.MALFORMED), (ErrorReply("OOM no"), FaultKind.OUT_OF_MEMORY)):
        with pytest.raises(StoreFault) as raised:
            resp.statuses([Status("OK"), reply])
        assert raised.value.kind is kind
