"""Bytes over sockets within a deadline: pairs of sockets, TLS servers, names that do not resolve."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.kv import stream as streams
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisstore import open_store
from antiphon.kv.redisurl import Address, BadStoreUrl
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer, PlainStream
from support.redisserver import Certificates, RedisServer, free_port, make_certificates, redis_server

PATIENCE_S = 20.0
SHORT_S = 0.05


class Pair:
    """A stream, and the peer's end of it."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        self.stream = PlainStream(mine)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.stream.close()
    made.peer.close()


def fault_of(call: object) -> FaultKind:
    """The kind of the StoreFault that a call raises."""
    assert callable(call)
    with pytest.raises(StoreFault) as raised:
        call()
    return raised.value.kind


def test_lines_and_bytes_in_any_slices(pair: Pair) -> None:
    """What comes byte by byte reads as if it came at once."""

    def say() -> None:
        for byte in b"$6\r\nval\r\nue\r\n":
            pair.peer.sendall(bytes((byte,)))

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(say)
        deadline = Deadline(PATIENCE_S)
        assert pair.stream.read_line(deadline) == b"$6"
        assert pair.stream.read(7, deadline) == b"val\r\nue"
        assert pair.stream.read_line(deadline) == b""
        said.result()
    assert pair.stream.is_silent()


def test_a_long_line_is_read_to_its_end(pair: Pair) -> None:
    """Longer than one look ahead; what follows stays."""
    line = b"-MISCONF " + b"x" * 500
    pair.peer.sendall(line + b"\r\n+OK\r\n")
    assert pair.stream.read_line(Deadline(PATIENCE_S)) == line
    assert not pair.stream.is_silent()
    assert pair.stream.read_line(Deadline(PATIENCE_S)) == b"+OK"


@pytest.mark.parametrize("said", [b"+OK\n", b"x" * 10_000])
def test_what_is_no_line_is_malformed(pair: Pair, said: bytes) -> None:
    """Without its CR, or without end."""
    pair.peer.sendall(said)
    assert fault_of(lambda: pair.stream.read_line(Deadline(PATIENCE_S))) is FaultKind.MALFORMED


@pytest.mark.parametrize("said", [b"", b"abc"])
def test_half_of_it_and_then_silence_is_a_timeout(pair: Pair, said: bytes) -> None:
    """The deadline holds, whether the first byte or the last is missing."""
    pair.peer.sendall(said)
    assert fault_of(lambda: pair.stream.read(6, Deadline(SHORT_S))) is FaultKind.TIMEOUT


def test_half_of_a_line_and_then_silence_is_a_timeout(pair: Pair) -> None:
    """As with values."""
    pair.peer.sendall(b"$12")
    assert fault_of(lambda: pair.stream.read_line(Deadline(SHORT_S))) is FaultKind.TIMEOUT


@pytest.mark.parametrize("said", [b"", b"abc"])
def test_half_of_it_and_then_the_end_is_unreachable(pair: Pair, said: bytes) -> None:
    """A peer that closes ends the wait at once."""
    pair.peer.sendall(said)
    pair.peer.close()
    assert fault_of(lambda: pair.stream.read(6, Deadline(PATIENCE_S))) is FaultKind.UNREACHABLE


def test_writing_waits_for_the_reader(pair: Pair) -> None:
    """Many parts, far more than fits into the socket's buffer, arrive whole and in order."""
    parts = [bytes((number,)) * (number * 50_000) for number in range(12)]

    def listen() -> bytes:
        got = bytearray()
        while data := pair.peer.recv(1 << 20):
            got += data
        return bytes(got)

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(listen)
        pair.stream.write(parts, Deadline(PATIENCE_S))
        pair.stream.close()
        assert heard.result() == b"".join(parts)


def test_writing_to_who_does_not_read_is_a_timeout(pair: Pair) -> None:
    """A stopped server's buffers fill; the deadline holds."""
    assert fault_of(lambda: pair.stream.write([bytes(1 << 24)], Deadline(SHORT_S))) is FaultKind.TIMEOUT


def test_shut_ends_another_threads_wait(pair: Pair) -> None:
    """Closing a store does not wait for the deadlines of its callers."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fault_of, lambda: pair.stream.read(6, Deadline(PATIENCE_S)))
        pair.stream.shut()
        assert waiting.result() is FaultKind.UNREACHABLE
    assert not pair.stream.is_silent()
    pair.stream.close()
    pair.stream.shut()


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    """A refused port, a socket that is no file."""
    dialer = Dialer(None)
    for address in (Address("127.0.0.1", free_port()), Address(str(tmp_path / "none.sock"), 0)):
        kind = fault_of(lambda address=address: dialer.dial(address, Deadline(PATIENCE_S)))
        assert kind is FaultKind.UNREACHABLE


def test_a_resolver_that_hangs_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up aside: the deadline does not depend on the resolver's own patience."""
    answer = threading.Event()
    real = socket.getaddrinfo

    def hanging(host: str, port: int, *, type: int, flags: int) -> object:
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, type=type, flags=flags)
        answer.wait()
        raise socket.gaierror("too late")

    monkeypatch.setattr(streams.socket, "getaddrinfo", hanging)
    dialer = Dialer(None)
    assert fault_of(lambda: dialer.dial(Address("kv.test", 1), Deadline(SHORT_S))) is FaultKind.TIMEOUT
    answer.set()
    assert fault_of(lambda: dialer.dial(Address("kv.test", 1), Deadline(PATIENCE_S))) is FaultKind.UNREACHABLE


def test_a_name_is_resolved() -> None:
    """localhost, whichever of its addresses listens."""
    with redis_server() as server:
        Dialer(None).dial(Address("localhost", server.port), Deadline(PATIENCE_S)).close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[RedisServer]:
    with redis_server("--tls-auth-clients", "yes", tls=certificates) as server:
        yield server


def test_our_own_certificate_is_shown(tls_server: RedisServer, certificates: Certificates) -> None:
    """A server that asks for one lets us in with it and not without."""
    shown = f"{tls_server.url}&cert={certificates.certificate}&key={certificates.key}"
    for url, is_let_in in ((shown, True), (tls_server.url, False)):
        store = open_store(url)
        run = store.get_run(["key"], PATIENCE_S)
        assert (run.fault is None) == is_let_in
        store.close()


def test_a_strangers_certificate_is_refused(tls_server: RedisServer) -> None:
    """Signed by an authority that is not ours: no byte of a command is sent."""
    store = open_store(tls_server.url.partition("?")[0])
    run = store.get_run(["key"], PATIENCE_S)
    assert run.fault is not None and run.fault.kind is FaultKind.UNREACHABLE
    assert "certificate verify failed" in run.fault.detail
    store.close()


def test_another_hosts_certificate_is_refused(tls_server: RedisServer) -> None:
    """It must name the host that was asked for."""
    store = open_store(tls_server.url.replace("127.0.0.1", "127.0.0.2"))
    run = store.get_run(["key"], PATIENCE_S)
    assert run.fault is not None and run.fault.kind is FaultKind.UNREACHABLE
    store.close()


def test_a_stopped_tls_server_is_a_timeout(tls_server: RedisServer) -> None:
    """The kernel accepts; nobody shakes hands."""
    store = open_store(tls_server.url)
    tls_server.pause()
    run = store.get_run(["key"], SHORT_S)
    tls_server.resume()
    assert run.fault is not None and run.fault.kind is FaultKind.TIMEOUT
    store.close()


def test_plain_words_to_a_tls_server(tls_server: RedisServer) -> None:
    """A URL without its second s is a fault, not a hang."""
    store = open_store(f"redis://127.0.0.1:{tls_server.port}")
    run = store.get_run(["key"], PATIENCE_S)
    assert run.fault is not None and run.fault.kind in (FaultKind.MALFORMED, FaultKind.UNREACHABLE)
    store.close()


def test_certificates_that_are_none(tmp_path: Path) -> None:
    """Missing and meaningless files are named when the store is opened."""
    nothing = tmp_path / "ca.pem"
    for _ in range(2):
        with pytest.raises(BadStoreUrl, match="cannot be used"):
            open_store(f"rediss://host?ca={nothing}")
        nothing.write_text("no certificate")
