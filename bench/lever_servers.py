"""Redis as `bench kv-levers` needs it: one server reached in three ways, and a cluster on this machine."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.errors import BenchFault
from bench.redisserver import binary
from bench.servers import Command, free_port, running

_TIMEOUT_S = 5.0
_SETTLED_S = 30.0
_POLL_S = 0.05
_NUM_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Ways:
    """URLs of one server."""

    unix: str
    tcp: str
    tls: str


@asynccontextmanager
async def one_server() -> AsyncIterator[Ways]:
    """On a socket, a port and a port with TLS; nothing on disk. Raises BenchFault."""
    with TemporaryDirectory(prefix="antiphon-bench-") as name:
        folder = Path(name)
        socket, port, tls_port = folder / "redis.sock", free_port(), free_port()
        make_certificates(folder)
        argv = ["--unixsocket", str(socket), "--unixsocketperm", "700", "--tls-port", str(tls_port)]
        argv += ["--tls-cert-file", f"{name}/server.pem", "--tls-key-file", f"{name}/server.key"]
        argv += ["--tls-ca-cert-file", f"{name}/ca.pem", "--tls-auth-clients", "no"]
        async with running(_command(name, port, argv)):
            tls = f"rediss://127.0.0.1:{tls_port}?ca={name}/ca.pem"
            yield Ways(f"unix://{socket}", f"redis://127.0.0.1:{port}", tls)


@asynccontextmanager
async def cluster(num_masters: int) -> AsyncIterator[str]:
    """The URL of so many masters that share the slots evenly. Raises BenchFault."""
    async with AsyncExitStack() as stack:
        ports, buses = [], []
        for _ in range(num_masters):
            folder = stack.enter_context(TemporaryDirectory(prefix="antiphon-bench-"))
            ports.append(free_port())
            buses.append(free_port())
            argv = ["--cluster-enabled", "yes", "--cluster-port", str(buses[-1])]
            await stack.enter_async_context(running(_command(folder, ports[-1], argv)))
        for number, (port, slots) in enumerate(zip(ports, slot_ranges(num_masters), strict=True)):
            with _client(port) as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", slots[0], slots[1])
                for other in range(number):
                    client.execute_command("CLUSTER MEET", "127.0.0.1", ports[other], buses[other])
        await _settled(ports)
        yield "redis-cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def slot_ranges(num_masters: int) -> list[tuple[int, int]]:
    """First and last slot of each."""
    bounds = [_NUM_SLOTS * number // num_masters for number in range(num_masters + 1)]
    return [(first, end - 1) for first, end in itertools.pairwise(bounds)]


def make_certificates(folder: Path) -> None:
    """An authority (ca.pem) and what it signed for 127.0.0.1 (server.pem, server.key). Raises BenchFault."""
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new_key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for command in (
        f"req -x509 {new_key} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        f"req {new_key} -keyout server.key -out server.csr -subj /CN=localhost",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names"
        " -out server.pem",
    ):
        _openssl(command.split(), folder)


def _openssl(args: Sequence[str], folder: Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise BenchFault("there is no openssl: apt-get install openssl")
    done = subprocess.run([program, *args], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchFault(f"openssl {args[0]}: {done.stderr.strip()}")


def _command(folder: str, port: int, argv: Sequence[str]) -> Command:
    async def answers() -> bool:
        try:
            with _client(port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    common = [binary(), "--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
    common += ["--save", "", "--appendonly", "no", *argv]
    return Command("redis-server", common, f"redis://127.0.0.1:{port}", "", probe=answers)


async def _settled(ports: Sequence[int]) -> None:
    """Until every server says that the cluster is whole."""
    try:
        async with asyncio.timeout(_SETTLED_S):
            while True:
                if all(map(_is_whole, ports)):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise BenchFault(f"the cluster did not settle within {_SETTLED_S:g} s") from None


def _is_whole(port: int) -> bool:
    with _client(port) as client:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _client(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0))
