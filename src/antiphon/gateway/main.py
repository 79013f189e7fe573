"""The gateway process: every object is built here, handed down, and ended here.

It serves until a signal comes or its task is cancelled. Then it stops in order: no new connections,
`drain_s` for answers that are being made, an error event to those that are not done by then, links last.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from antiphon.core.catalogue import ModelEntry, RouteEntry
from antiphon.core.clock import WallClock
from antiphon.core.scope import ScopeMaker
from antiphon.gateway.admin import Admin
from antiphon.gateway.admission import Admission
from antiphon.gateway.app import Gauges, build_app
from antiphon.gateway.callers import Callers, is_loopback, require_guard
from antiphon.gateway.clienttokens import ClientTokens
from antiphon.gateway.cors import Origins
from antiphon.gateway.desk import Desk, RequestBounds
from antiphon.gateway.erasures import ErasureWatch
from antiphon.gateway.heads import HeadBounds
from antiphon.gateway.keyring import KeyRing
from antiphon.gateway.limiter import Limiter
from antiphon.gateway.mirror import Mirror
from antiphon.gateway.models import ServedModels
from antiphon.gateway.usagebook import UsageBook
from antiphon.kv.controlredis import ControlRedis
from antiphon.kv.leases import Leases
from antiphon.kv.limitcounters import LimitCounters
from antiphon.kv.redisurl import StoreUrl
from antiphon.net.certificate import CertificateFiles, ServerCertificate, trusting
from antiphon.obs.log import Logger
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.admission import QueueBounds
from antiphon.router.backends import Backends, Workers
from antiphon.router.dispatch import Dispatcher, FailureHandling
from antiphon.router.places import Places
from antiphon.router.registry import Registry
from antiphon.router.rivals import PolicyName
from antiphon.router.upstreamdialects import dialect_of
from antiphon.router.upstreamids import IdsUpstream
from antiphon.router.upstreams import Upstreams
from antiphon.router.watch import Patience
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.tenants import TenantStore
from antiphon.store.usage import UsageStore

_BACKLOG = 2048
_LAST_WORDS_S = 2  # from the end of the drain to the end of the process
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How one gateway process is run."""

    workers: tuple[str, ...] = ()  # addresses: http://HOST:PORT
    control: StoreUrl | None = None  # the Redis in which workers have their leases
    models: tuple[ModelEntry, ...]
    routes: tuple[RouteEntry, ...] = ()
    upstream_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # by environment variable
    routing: PolicyName = PolicyName.COST
    patience: Patience = field(default_factory=Patience)
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    secret: str = ""  # shared with the workers
    database: str = field(repr=False)  # URL: tenants and keys
    scope_secret: bytes = field(repr=False)  # shared by the gateways of a fleet
    public_systems: tuple[str, ...] = ()  # system prompts whose KV all tenants may share
    require_key: bool = False  # on loopback too
    behind_proxy: bool = False  # somebody else checks callers: no keys are needed to bind other hosts
    cors_origins: tuple[str, ...] = ()  # of pages that may read answers
    tls: CertificateFiles | None = None  # None: plain HTTP
    worker_ca: Path | None = None  # vouches for workers at https addresses; None: the system does
    max_body_bytes: int = 4 * 2**20
    request_timeout_s: float = 600.0
    queue: QueueBounds = field(default_factory=QueueBounds)
    drain_s: float = 10.0


async def run_gateway(settings: GatewaySettings, on_ready: Callable[[int], None], log: Logger) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` gets the port. Raises BadRequest, OSError (port taken)."""
    serving = asyncio.create_task(serve(settings, on_ready, log), name="gateway")
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, serving.cancel)
    try:
        await asyncio.wait([serving])
    finally:
        serving.cancel()  # where this task was cancelled itself
        await asyncio.wait([serving])
        for number in signals:
            loop.remove_signal_handler(number)
    if not serving.cancelled():
        serving.result()


async def serve(settings: GatewaySettings, on_ready: Callable[[int], None], log: Logger) -> None:
    """Serve until cancelled."""
    database = await Database.open(settings.database)
    try:
        ring = KeyRing(KeyStore(database), WallClock(), log)
        await ring.refresh()
        is_guarded = ring.has_keys or settings.require_key
        require_guard(settings.host, has_keys=is_guarded, behind_proxy=settings.behind_proxy)
        await _serve_callers(database, ring, settings, on_ready, log)
    finally:
        await database.close()


async def _serve_callers(
    database: Database,
    ring: KeyRing,
    settings: GatewaySettings,
    on_ready: Callable[[int], None],
    log: Logger,
) -> None:
    metrics = GatewayMetrics()
    upstreams = Upstreams.of(settings.models, settings.upstream_keys, metrics.upstreams, WallClock(), log)
    mirror = Mirror(metrics.upstreams, log)
    try:
        failure = FailureHandling(settings.patience, metrics.failover)
        dispatcher = Dispatcher(
            settings.workers, settings.secret, log, routing=settings.routing, failure=failure
        )
        if settings.worker_ca is not None:
            dispatcher.fleet.trust(trusting(settings.worker_ca))
        models = ServedModels.load(
            settings.models, settings.public_systems, settings.routes, upstreams.by_name
        )
        bounds = RequestBounds(settings.max_body_bytes, settings.request_timeout_s)
        backends = Backends(Workers(dispatcher), _by_ids(settings.models, models, upstreams))
        scopes = ScopeMaker(settings.scope_secret)
        desk = Desk(models, backends, scopes, bounds, mirror, log)
        places = Places(dispatcher.survey, _most_in_flight(settings.models))
        desk.gate = admission = Admission(places, settings.queue, metrics.admission, WallClock())
        prices = {entry.name: entry.price for entry in settings.models}
        book = UsageBook(UsageStore(database), prices, metrics.usage, WallClock(), log)
        limiter = _limiter(settings, book, database, metrics, log)
        desk.check_in.add(limiter.reserve)
        desk.check_in.add(book.open)
        callers = _callers(settings, ring)
        gauges = Gauges(metrics, dispatcher, upstreams, admission)
        app = build_app(desk, models, callers, gauges, Admin.of(database))
        registry = _registry(settings, dispatcher, metrics, log)
        erasures = ErasureWatch(TenantStore(database), dispatcher.fleet, scopes, WallClock(), log)
        certificate = (
            None if settings.tls is None else ServerCertificate(settings.tls, log, metrics.tls_end.set)
        )
        beside: list[_Runner] = [dispatcher, ring, book, limiter, erasures]
        beside += [runner for runner in (registry, certificate) if runner is not None]
        config = _config(app, settings.drain_s, certificate)
        server = _Server(config, settings.drain_s, desk.abort_all)
        with _listen(settings.host, settings.port) as listener:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one.run(), name=type(one).__name__) for one in beside]
                await server.serve_until_cancelled(listener, lambda: on_ready(listener.getsockname()[1]))
                for task in running:
                    task.cancel()
    finally:
        await mirror.close()
        await upstreams.close()


class _Runner(Protocol):
    """What goes on beside the requests, until it is cancelled."""

    async def run(self) -> None: ...


def _callers(settings: GatewaySettings, ring: KeyRing) -> Callers:
    return Callers(
        ring,
        ClientTokens(settings.scope_secret),
        Origins(settings.cors_origins),
        is_loopback=is_loopback(settings.host),
        behind_proxy=settings.behind_proxy,
        require_key=settings.require_key,
    )


def _by_ids(
    entries: Sequence[ModelEntry], models: ServedModels, upstreams: Upstreams
) -> dict[str, IdsUpstream]:
    """Backends of the models whose upstreams take token ids."""
    found = {}
    for entry in entries:
        if entry.upstream is not None and entry.upstream.takes_ids:
            model = models.served(entry.name)
            dialect = dialect_of(entry.upstream, model.tokenizer.encode)
            found[entry.name] = IdsUpstream(upstreams.by_name[entry.name], dialect, model.context_tokens)
    return found


def _most_in_flight(entries: Sequence[ModelEntry]) -> dict[str, int]:
    """Requests that may be at once at each server that answers for us."""
    return {entry.name: entry.upstream.max_in_flight for entry in entries if entry.upstream is not None}


def _config(app: Starlette, drain_s: float, certificate: ServerCertificate | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HeadBounds,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s) + _LAST_WORDS_S,
    )


def _limiter(
    settings: GatewaySettings, book: UsageBook, database: Database, metrics: GatewayMetrics, log: Logger
) -> Limiter:
    shared = (
        None if settings.control is None else LimitCounters(ControlRedis(settings.control), book.gateway_id)
    )
    return Limiter(shared, UsageStore(database), metrics.limits, WallClock(), log)


def _registry(
    settings: GatewaySettings, dispatcher: Dispatcher, metrics: GatewayMetrics, log: Logger
) -> Registry | None:
    if settings.control is None:
        return None
    leases = Leases(ControlRedis(settings.control), settings.secret)
    offered = {entry.name for entry in settings.models}
    return Registry(leases, dispatcher.fleet, offered.__contains__, metrics.registry, WallClock(), log)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, stopped by cancellation instead."""

    def __init__(self, config: uvicorn.Config, drain_s: float, give_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._give_up = give_up  # called for what is not done after `drain_s`
        self._on_started: Callable[[], None] = lambda: None
        self._cancelled: asyncio.CancelledError | None = None

    async def serve_until_cancelled(self, listener: socket.socket, on_started: Callable[[], None]) -> None:
        """Serve; when cancelled, shut down in order and then raise the cancellation."""
        self._on_started = on_started
        await self.serve(sockets=[listener])
        if self._cancelled is not None:
            raise self._cancelled

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def main_loop(self) -> None:
        try:
            await super().main_loop()
        except asyncio.CancelledError as cancelled:
            self._cancelled = cancelled  # raised again when the shutdown is done

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    # Inherited by connections. asyncio sets it only on sockets whose protocol number is spelled out,
    # and without it head and body of a response are 40 ms apart.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
