"""Real Redis servers for tests: single (TCP, unix socket, TLS), a cluster of masters, a Sentinel.

Each context manager yields a running thing with its `url` and kills every process at its end. A server
logs to its standard output, which a thread reads: tests wait for a log line instead of sleeping.
Where no server binary is installed the test that asks for one is skipped; with
ANTIPHON_REQUIRE_REDIS in the environment, as CI has it, that test fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

PATIENCE_S = 20.0


def find_redis() -> str:
    """The server's binary; where there is none the test is skipped, or fails where CI wants one."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        ending = pytest.fail if os.environ.get("ANTIPHON_REQUIRE_REDIS") else pytest.skip
        ending("needs redis-server or valkey-server (apt-get install redis-server)")
    return binary


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Certificates:
    """Paths of an authority and of a key pair it signed for localhost and 127.0.0.1."""

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A fresh authority and server certificate; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    ca, certificate, key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
    ca_key, request, names = folder / "ca.key", folder / "server.csr", folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new_key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for command in (
        f"req -x509 {new_key} -keyout {ca_key} -out {ca} -days 2 -subj /CN=authority",
        f"req {new_key} -keyout {key} -out {request} -subj /CN=localhost",
        f"x509 -req -in {request} -CA {ca} -CAkey {ca_key} -CAcreateserial -days 2 -extfile {names}"
        f" -out {certificate}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return Certificates(ca, certificate, key)


@dataclass
class RedisServer:
    """One server process. `start` may be called again after `kill`: same place, same settings, no data."""

    url: str
    command: list[str]
    folder: Path
    port: int = 0
    socket_path: Path | None = None
    log: list[str] = field(default_factory=list)

    def start(self, ready: str = "ready to accept connections") -> None:
        self.log.clear()
        self._logged = threading.Condition()
        self._process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.await_log(ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_log(self, text: str, count: int = 1, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `text` stands in `count` lines of what this process logged; case does not matter."""
        with self._logged:
            found = self._logged.wait_for(
                lambda: self._count(text) >= count or not self._reader.is_alive(), timeout_s
            )
        assert found and self._count(text) >= count, f"no {text!r} in the log:\n" + "".join(self.log)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def pause(self) -> None:
        """SIGSTOP; returns when the process stands still. It still accepts connections: the kernel does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """SIGCONT; returns when the process runs again."""
        os.kill(self.pid, signal.SIGCONT)
        os.waitid(os.P_PID, self.pid, os.WCONTINUED)

    def client(self, username: str | None = None, password: str | None = None) -> redis.Redis:
        """A plain client, for a test's own dealings; use it in a `with` block. Not for TLS."""
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            unix_socket_path=str(self.socket_path) if self.socket_path else None,
            username=username,
            password=password,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=PATIENCE_S,
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()
        with self._logged:
            self._logged.notify_all()

    def _count(self, text: str) -> int:
        return sum(text.lower() in line.lower() for line in self.log)


@contextlib.contextmanager
def redis_server(
    *config: str, unix: bool = False, tls: Certificates | None = None, port: int | None = None
) -> Iterator[RedisServer]:
    """One server without persistence. `config`: more arguments, as "--maxmemory", "20mb"."""
    with _folder() as folder:
        server = _single(folder, config, unix=unix, tls=tls, port=port)
        with _running(server):
            yield server


def _single(
    folder: Path,
    config: tuple[str, ...],
    *,
    unix: bool = False,
    tls: Certificates | None = None,
    port: int | None = None,
) -> RedisServer:
    command = [find_redis(), "--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", ""]
    command += ["--dir", str(folder)]
    if unix:
        path = folder / "redis.sock"
        command += ["--port", "0", "--unixsocket", str(path), *config]
        return RedisServer(f"unix://{path}", command, folder, socket_path=path)
    port = port or free_port()
    command += ["--bind", "127.0.0.1"]
    if tls is None:
        command += ["--port", str(port), *config]
        return RedisServer(f"redis://127.0.0.1:{port}", command, folder, port)
    command += ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(tls.certificate)]
    command += ["--tls-key-file", str(tls.key), "--tls-ca-cert-file", str(tls.ca)]
    command += ["--tls-auth-clients", "no", *config]
    return RedisServer(f"rediss://127.0.0.1:{port}?ca={tls.ca}", command, folder, port)


@dataclass
class RedisCluster:
    """Masters that share the slots evenly, in order."""

    url: str
    servers: list[RedisServer]


@contextlib.contextmanager
def redis_cluster(*config: str, num_masters: int = 3) -> Iterator[RedisCluster]:
    """A settled cluster; shards that live go on when another one dies."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(num_masters):
            folder = stack.enter_context(_folder())
            bus = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            server = _single(folder, (*bus, "--cluster-node-timeout", "2000", *config))
            servers.append(stack.enter_context(_running(server)))
        _join(servers)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        yield RedisCluster(f"redis-cluster://{hosts}", servers)


def _join(servers: list[RedisServer]) -> None:
    bounds = [16384 * number // len(servers) for number in range(len(servers) + 1)]
    for number, server in enumerate(servers):
        with server.client() as client:
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            for other in servers[:number]:
                bus = other.command[other.command.index("--cluster-port") + 1]
                client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, bus)
    for server in servers:
        server.await_log("Cluster state changed: ok")
    for server in servers:
        with server.client() as client:
            client.config_set("cluster-require-full-coverage", "no")


@dataclass
class RedisSentinel:
    """A master with one replica, watched by one Sentinel; `url` also names a Sentinel that is not there."""

    url: str
    master: RedisServer
    replica: RedisServer
    sentinel: RedisServer

    def fail_over(self) -> None:
        """Kill the master and wait until the replica is promoted."""
        self.master.kill()
        self.sentinel.await_log("+switch-master")


@contextlib.contextmanager
def redis_sentinel(name: str = "mymaster", down_after_ms: int = 500) -> Iterator[RedisSentinel]:
    """Sentinel on loopback, settled: it knows master and replica."""
    with contextlib.ExitStack() as stack:
        config = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(redis_server(*config))
        replica_of = ("--replicaof", "127.0.0.1", str(master.port))
        replica = stack.enter_context(redis_server(*config, *replica_of))
        replica.await_log("sync: Finished with success")
        folder = stack.enter_context(_folder())
        port = free_port()
        path = folder / "sentinel.conf"
        path.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor {name} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {name} {down_after_ms}\n"
            f"sentinel failover-timeout {name} 5000\n"
        )
        command = [find_redis(), str(path), "--sentinel"]
        sentinel = RedisServer(f"redis://127.0.0.1:{port}", command, folder, port)
        stack.enter_context(_running(sentinel, "+slave slave"))
        url = f"redis-sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/{name}"
        yield RedisSentinel(url, master, replica, sentinel)


@contextlib.contextmanager
def _running(server: RedisServer, ready: str = "ready to accept connections") -> Iterator[RedisServer]:
    try:
        server.start(ready)
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Short paths: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="antiphon-redis-", dir="/tmp") as name:
        yield Path(name)
