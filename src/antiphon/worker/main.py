"""Builds and runs a worker process: model file → engine thread → one port.

The only place that knows all parts of a worker. Ends in order on SIGTERM and SIGINT: no new
generations, running ones finish within `drain_s`, then the engine stops. An engine that dies takes
the process with it (EngineFault), so that whoever supervises it starts a fresh one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from antiphon.core.catalogue import ModelEntry
from antiphon.core.clock import Clock, WallClock
from antiphon.core.errors import EngineFault
from antiphon.core.generation import Role
from antiphon.core.lease import Lease
from antiphon.core.wire import PROTOCOL
from antiphon.engine.engine import Engine
from antiphon.kv.cache import KvCache
from antiphon.kv.events import Directory
from antiphon.kv.heap import keep_freed
from antiphon.net.certificate import CertificateFiles, ServerCertificate
from antiphon.obs.log import Logger
from antiphon.obs.metrics import WorkerMetrics
from antiphon.tokens.modelfile import context_of, locate
from antiphon.worker.app import WorkerApp, WorkerParts
from antiphon.worker.build import EngineSize, LoadedModel, build_engine, describe, thread_counts
from antiphon.worker.enginethread import EngineThread, StepNews
from antiphon.worker.kvsettings import KvSettings
from antiphon.worker.kvtiers import open_tiers, tier_rates
from antiphon.worker.lease import LeaseKeeper, LeaseSettings, leased
from antiphon.worker.links import Links
from antiphon.worker.meter import Meter
from antiphon.worker.rates import Speedometer
from antiphon.worker.weightcache import Locked, LockTimeout
from antiphon.worker.weights import Progress, TuningSetup, choose_weights

_START_DEADLINE_S = 60.0  # for the workers of this machine that start at the same time
_WRITE_OUT_S = 5.0  # for what the engine held to reach the store
_GIVE_BACK_S = 2.0  # for a step to end, so that what is left can be given back
_DEATH_GRACE_S = 1.0  # for the last outputs and a 503 to be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker process is run. Port 0: any free one."""

    entry: ModelEntry
    secret: str
    name: str = "worker"
    host: str = "127.0.0.1"
    port: int = 0
    weights: str = "auto"
    weights_folder: Path  # where tuned weights are kept, shared by the workers of a machine
    size: EngineSize = field(default_factory=EngineSize)
    kv: KvSettings = field(default_factory=KvSettings)
    role: Role = Role.BOTH
    lease: LeaseSettings | None = None  # None: gateways are told where it is by somebody else
    drain_s: float = 30.0
    tls: CertificateFiles | None = None  # None: plain HTTP and WebSockets


async def run_worker(
    settings: WorkerSettings, on_ready: Callable[[int], None], on_progress: Progress, log: Logger
) -> None:
    """Serve until a signal comes. `on_ready` gets the port. Raises EngineFault, OSError (port taken)."""
    keep_freed()  # values of the KV tiers come and go; before the first thread
    clock = WallClock()
    on_progress("looking at the model", 0.0)
    model = await asyncio.to_thread(_load, settings, on_progress, log)
    engine = EngineThread(clock, log)
    metrics = WorkerMetrics()
    meter = Meter(metrics)
    speed = Speedometer()
    links: Links | None = None

    def deliver(news: StepNews) -> None:
        meter.take(news)
        speed.take(news.counters.steps, news.step)
        if links is not None:
            links.deliver(news)

    on_progress("loading the model", 0.9)
    built = await engine.start(lambda: _build(settings, model, clock, on_progress, log), deliver)
    speed.start(built.runner.start_prefill_tokens_per_s)
    info = describe(settings.name, settings.role, model, built)
    kv = open_tiers(settings.kv, built.runner, bytes.fromhex(info.namespace), clock, log)
    if kv is not None:
        engine.attach(kv)
    directory = Directory() if kv is None else kv.directory
    engine.report_to(directory)
    links = Links(engine, info, directory, secret=settings.secret, metrics=metrics, log=log)
    links.load = built.load()
    links.rates = lambda: speed.rates(None if kv is None else tier_rates(kv, built.runner))
    parts = WorkerParts(engine=engine, links=links, metrics=metrics, info=info, secret=settings.secret, kv=kv)
    log.info("worker.ready", model=info.model, engine=info.engine, shares_blocks=built.runner.shares_blocks)
    try:
        await _serve(settings, parts, on_ready, log)
    finally:
        await engine.stop()  # copies out what it still holds
        if kv is not None:
            await asyncio.to_thread(_close, kv)
    if engine.failure is not None:
        raise EngineFault("The engine died; see the log.") from engine.failure


def _build(
    settings: WorkerSettings, model: LoadedModel, clock: Clock, on_progress: Progress, log: Logger
) -> Engine:
    """Build the engine, one worker of a machine after the other: each times its steps then.

    Whoever cannot have the lock builds without it: the figures are worse then, nothing else is.
    """
    file = settings.weights_folder / "start.lock"
    lock = Locked(file, "measuring its steps", _START_DEADLINE_S, on_progress)
    with contextlib.ExitStack() as held:
        if model.path is not None:
            try:
                held.enter_context(lock)
            except (OSError, LockTimeout) as error:
                log.warning("worker.measures_unlocked", reason=str(error))
        return build_engine(model, settings.size, settings.kv, settings.role, clock)


def _close(kv: KvCache) -> None:
    kv.drain(_WRITE_OUT_S)
    kv.close()


def _load(settings: WorkerSettings, on_progress: Progress, log: Logger) -> LoadedModel:
    entry = settings.entry
    source = locate(entry)
    if source is None:
        return LoadedModel(entry, None, f"scripted-{entry.script}", context_of(entry))
    setup = TuningSetup(
        folder=settings.weights_folder,
        threads=thread_counts(settings.size.threads)[-1],
        progress=on_progress,
        log=log,
    )
    weights = choose_weights(source, settings.weights, setup)
    log.info("weights.chosen", format=weights.format, digest=weights.digest)
    return LoadedModel(entry, weights.path, weights.digest, context_of(entry))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal begins the drain instead."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    settings: WorkerSettings, parts: WorkerParts, on_ready: Callable[[int], None], log: Logger
) -> None:
    links, engine = parts.links, parts.engine
    certificate = None if settings.tls is None else ServerCertificate(settings.tls, log)
    listener = socket.create_server((settings.host, settings.port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited: asyncio skips such sockets
    config = uvicorn.Config(
        WorkerApp(parts),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=2,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
    )
    server = _Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await server.listens.wait()
        port = listener.getsockname()[1]
        on_ready(port)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(_looked_after(certificate))
            lease: LeaseKeeper | None = None
            if settings.lease is not None:
                address = settings.lease.advertise or _address(settings, port)
                held = leased(settings.lease, settings.secret, _describer(address, parts), parts.metrics, log)
                lease = await stack.enter_async_context(held)
            await _until_stop(stop, serving, engine)
            links.drain()
            if lease is not None:
                lease.renew_now()
            if engine.failure is None:
                await _finish(links, engine, settings.drain_s)
    finally:
        server.should_exit = True
        await serving


async def _finish(links: Links, engine: EngineThread, drain_s: float) -> None:
    """Let running answers end; give those back that are not done by then."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(links.wait_idle(), drain_s)
        return
    engine.give_back()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(links.wait_idle(), _GIVE_BACK_S)


def _address(settings: WorkerSettings, port: int) -> str:
    scheme, host = "http" if settings.tls is None else "https", settings.host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.asynccontextmanager
async def _looked_after(certificate: ServerCertificate | None) -> AsyncIterator[None]:
    """Inside, its files are looked after."""
    if certificate is None:
        yield
        return
    task = asyncio.create_task(certificate.run(), name="certificate")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _describer(address: str, parts: WorkerParts) -> Callable[[str], Lease | None]:
    """Makes the lease of any moment; None while the engine stands still."""

    def describe(worker_id: str) -> Lease | None:
        if not parts.engine.is_healthy:
            return None
        load = parts.links.report()
        return Lease(id=worker_id, address=address, protocol=PROTOCOL, info=parts.info, load=load)

    return describe


async def _until_stop(stop: asyncio.Event, serving: asyncio.Task[None], engine: EngineThread) -> None:
    """Wait for a signal, or for the engine's end."""
    while not stop.is_set() and not serving.done():
        if engine.failure is not None:
            await asyncio.sleep(_DEATH_GRACE_S)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.25)
