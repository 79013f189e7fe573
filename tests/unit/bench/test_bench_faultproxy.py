"""bench/faultproxy.py: each fault is what it says, and a proxy without faults is not there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from bench.faultproxy import FaultProxy, Faults

SAID = bytes(range(256)) * 1000


@pytest.fixture
def port() -> Iterator[int]:
    """A server that answers each byte it gets with everything it has to say."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while client.recv(1):
                client.sendall(SAID)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=talk, args=[client], daemon=True).start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    server.join()
    listener.close()


@pytest.fixture
def proxy(port: int) -> Iterator[FaultProxy]:
    with FaultProxy.to_port(port) as made:
        yield made


@contextlib.contextmanager
def asked(proxy: FaultProxy, timeout_s: float = 20.0) -> Iterator[socket.socket]:
    """A connection on which one answer is under way."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout_s) as client:
        client.sendall(b"?")
        yield client


def read(client: socket.socket, num: int) -> bytes:
    """So many bytes, or fewer where the connection ends."""
    data = b""
    while len(data) < num and (more := client.recv(num - len(data))):
        data += more
    return data


def test_without_faults_bytes_pass(proxy: FaultProxy) -> None:
    """Unchanged, on several connections."""
    for _ in range(2):
        with asked(proxy) as client:
            assert read(client, len(SAID)) == SAID
    assert proxy.num_connections == 2


def test_delay_is_latency(proxy: FaultProxy) -> None:
    """All bytes come that much later, not each chunk after the other."""
    proxy.faults = Faults(delay_s=0.2)
    started_s = time.monotonic()
    with asked(proxy) as client:
        assert read(client, len(SAID)) == SAID
    assert time.monotonic() - started_s >= 0.2


def test_throttled_bytes_take_their_time(proxy: FaultProxy) -> None:
    """At the rate that was set, at most."""
    proxy.faults = Faults(bytes_per_s=1e6)
    started_s = time.monotonic()
    with asked(proxy) as client:
        assert read(client, len(SAID)) == SAID
    assert time.monotonic() - started_s >= len(SAID) / 1e6


def test_swallowed_bytes_never_come(proxy: FaultProxy) -> None:
    """Some come, then nothing: the connection stands open and is silent."""
    proxy.faults = Faults(swallow_after=1000)
    with asked(proxy, timeout_s=0.2) as client:
        assert read(client, 1000) == SAID[:1000]
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_a_reset_comes_after_its_bytes(proxy: FaultProxy) -> None:
    """The client sees an error, not an end."""
    proxy.faults = Faults(reset_after=1000)
    with asked(proxy) as client, pytest.raises(ConnectionResetError):
        read(client, len(SAID))


def test_one_byte_is_changed(proxy: FaultProxy) -> None:
    """The one that was named."""
    proxy.faults = Faults(flip_at=70_000)
    with asked(proxy) as client:
        data = read(client, len(SAID))
    wrong = [place for place in range(len(SAID)) if data[place] != SAID[place]]
    assert wrong == [70_000]


def test_faults_may_change_while_connections_are_open(proxy: FaultProxy) -> None:
    """A store that falls silent, and one that comes back."""
    proxy.faults = Faults(swallow_after=0)
    with asked(proxy, timeout_s=0.1) as client, pytest.raises(TimeoutError):
        client.recv(1)
    proxy.faults = Faults()
    with asked(proxy) as client:
        assert read(client, len(SAID)) == SAID


def test_connections_can_be_cut(proxy: FaultProxy) -> None:
    """All of now; later ones work."""
    with asked(proxy) as client:
        read(client, len(SAID))
        proxy.cut()
        assert client.recv(1) == b""
    with asked(proxy) as client:
        assert read(client, len(SAID)) == SAID


def test_no_server_no_connection() -> None:
    """Nobody listens behind it: the client is turned away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused = listener.getsockname()[1]
    with FaultProxy.to_port(unused) as proxy:
        try:
            with asked(proxy) as client:
                data = client.recv(1)
        except ConnectionError:
            data = b""
    assert data == b""


def test_requests_pass_at_the_rate_that_is_set(port: int) -> None:
    """A question asked at a crawl is answered when the crawl is over: cut before, it never arrives."""
    with FaultProxy.to_port(port) as proxy:
        proxy.faults = Faults(request_bytes_per_s=0.01)
        with asked(proxy) as client:
            client.settimeout(0.05)
            with pytest.raises(TimeoutError):
                client.recv(1)
        proxy.faults = Faults()
        with asked(proxy) as client:
            assert read(client, len(SAID)) == SAID
