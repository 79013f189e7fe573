"""The control Redis, for the event loop: a few small commands now and then, by redis-py.

Owns one client and its connections. Invariants: a call ends by its deadline, whatever the server does;
after a fault or a cancellation the client is thrown away with its connections, so that no late reply
meets another command, and the next call asks anew where the servers are (DNS, Sentinels, the shards of
a cluster). It neither retries nor waits: its users ask again when their time comes, and no request
waits for one. KV blocks do not pass here: their path is redisstore.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from antiphon.kv.redisurl import Login, Mode, StoreUrl, Tls

TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 0.2
_MAX_TEXT = 200


class ControlFault(Exception):
    """A call failed as a whole; the text says why."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What came instead of a reply to one command: the server's error, or why its shard said nothing."""

    text: str


Command: TypeAlias = tuple[str | bytes | int, ...]
_Client: TypeAlias = "Redis | RedisCluster"
Reply: TypeAlias = "bytes | int | list[Reply] | dict[bytes, bytes] | Refusal | None"


class ControlRedis:
    """Connects when it is first used. Use `close` at the end."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._clients: list[_Client] = []

    def __str__(self) -> str:
        """Servers and mode, without secrets."""
        return str(self._url)

    async def run(self, commands: Sequence[Command], timeout_s: float = TIMEOUT_S) -> list[Reply]:
        """Send commands at once; a reply to each, in order. Each may name one key. Raises ControlFault.

        They are no transaction. Where a cluster's shard is away its commands are refused, or the call
        fails.
        """
        is_sound = False
        try:
            with _faults(timeout_s):
                async with asyncio.timeout(timeout_s):
                    replies = await self._run(commands)
            is_sound = not any(map(_is_loss, replies))
        finally:
            if not is_sound:
                await self.close()
        return [Refusal(_text(reply)) if isinstance(reply, Exception) else reply for reply in replies]

    async def time_s(self, timeout_s: float = TIMEOUT_S) -> float:
        """Unix time by the server's clock; in a cluster by that of any shard. Raises ControlFault."""
        is_sound = False
        try:
            with _faults(timeout_s):
                async with asyncio.timeout(timeout_s):
                    seconds, micros = await self._time()
            is_sound = True
        finally:
            if not is_sound:
                await self.close()
        return seconds + micros / 1e6

    async def close(self) -> None:
        """Drop every connection. The next call connects anew."""
        clients, self._clients = self._clients, []
        for client in clients:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.aclose()

    async def _time(self) -> tuple[int, int]:
        client = self._client()
        if isinstance(client, RedisCluster):
            found = await client.execute_command("TIME", target_nodes=RedisCluster.RANDOM)
        else:
            found = await client.execute_command("TIME")  # type: ignore[no-untyped-call]  # of redis-py
        seconds, micros = found
        return int(seconds), int(micros)

    def _client(self) -> _Client:
        if not self._clients:
            self._clients = _open(self._url)
        return self._clients[0]

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        async with self._client().pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)


def _open(url: StoreUrl) -> list[_Client]:
    """Clients that have not connected yet: the one that takes commands, then those it asks where to go."""
    if url.mode is Mode.CLUSTER:
        nodes = [ClusterNode(address.host, address.port) for address in url.addresses]
        return [RedisCluster(startup_nodes=nodes, **_options(url.login, url.tls))]
    options = _options(url.login, url.tls) | {"db": url.login.db}
    if url.mode is Mode.SENTINEL:
        hosts = [(address.host, address.port) for address in url.addresses]
        own = _options(url.sentinel_login, url.tls)
        sentinels = Sentinel(hosts, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]  # of redis-py
        return [sentinels.master_for(url.master), *sentinels.sentinels]
    (address,) = url.addresses
    if address.is_unix:
        return [Redis(unix_socket_path=address.host, **options)]
    return [Redis(host=address.host, port=address.port, **options)]


def _options(login: Login, tls: Tls | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": login.username,
        "password": login.password,
        "retry": Retry(NoBackoff(), 0),
        # The call's own deadline is the only one: where these are set redis-py sends under
        # asyncio.wait_for, which in Python 3.11 may swallow a cancellation, that of the deadline too.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "protocol": 2,  # nothing is pushed to us
        "driver_info": None,  # and nothing is said that an ACL would have to allow
        "max_connections": 8,
    }
    if tls is not None:
        options |= {
            "ssl": True,
            "ssl_ca_certs": tls.ca,
            "ssl_certfile": tls.certificate,
            "ssl_keyfile": tls.key,
        }
    return options


@contextlib.contextmanager
def _faults(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise ControlFault(_text(error) or f"no answer within {timeout_s:g} s") from error


def _is_loss(reply: object) -> bool:
    """Whether a shard was lost on the way: the others have answered."""
    return isinstance(reply, Exception) and not isinstance(reply, ResponseError)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_TEXT]
