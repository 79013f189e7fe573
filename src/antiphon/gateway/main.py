"""The gateway process: every object is built here, handed down, and ended here.

It serves until a signal comes or its task is cancelled. Then it stops in order: no new connections,
`drain_s` for answers that are being made, an error event to those that are not done by then, links last.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.gateway.app import build_app
from antiphon.gateway.desk import Desk, Limits
from antiphon.gateway.models import ServedModels
from antiphon.obs.log import Logger
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.dispatch import Dispatcher

_BACKLOG = 2048
_LAST_WORDS_S = 2  # from the end of the drain to the end of the process
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How one gateway process is run."""

    workers: tuple[str, ...]  # addresses: http://HOST:PORT
    models: tuple[ModelEntry, ...]
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    secret: str = ""  # shared with the workers
    behind_proxy: bool = False  # somebody else checks keys: other hosts than loopback may be bound
    max_body_bytes: int = 4 * 2**20
    request_timeout_s: float = 600.0
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
    _check_host(settings)
    models = ServedModels.load(settings.models)
    metrics = GatewayMetrics()
    dispatcher = Dispatcher(settings.workers, settings.secret, log)
    desk = Desk(models, dispatcher, Limits(settings.max_body_bytes, settings.request_timeout_s), log)
    app = build_app(desk, models, dispatcher, metrics, log)
    with _listen(settings.host, settings.port) as listener:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.drain_s) + _LAST_WORDS_S,
        )
        server = _Server(config, settings.drain_s, dispatcher.abort_all)
        async with asyncio.TaskGroup() as tasks:
            links = tasks.create_task(dispatcher.run(), name="links")
            await server.serve_until_cancelled(listener, lambda: on_ready(listener.getsockname()[1]))
            links.cancel()


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


def _check_host(settings: GatewaySettings) -> None:
    host = settings.host
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not settings.behind_proxy:
        raise BadRequest(
            f"The gateway has no keys yet, so it does not bind {host}: anybody who reaches it could use it. "
            "Bind 127.0.0.1, or say that a proxy in front of it checks who may call (--behind-proxy)."
        )


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
