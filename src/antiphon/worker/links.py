"""The worker's end of its WebSockets, one per gateway.

Owns which generation belongs to which gateway. Invariants: outputs of a step leave in one frame per
gateway; a gateway that reads slowly gets its outputs merged and, past `MAX_PENDING` of them, loses its
connection; a connection that ends takes its generations with it; news of blocks (blocknews.py) never
hold up outputs. Speaks core/wire.py over plain ASGI.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from antiphon.core.generation import Generation, Load, StepOutput, Terminal, WorkerInfo, WorkerRates
from antiphon.core.wire import (
    HEARTBEAT_S,
    PROTOCOL,
    Abort,
    Forget,
    Frame,
    Hello,
    Resync,
    Submit,
    Up,
    decode_down,
    encoder,
)
from antiphon.kv.events import Directory
from antiphon.obs.log import Logger
from antiphon.obs.metrics import WorkerMetrics
from antiphon.worker.blocknews import BlockFeed, BlockNews
from antiphon.worker.enginethread import EngineThread, StepNews

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

MAX_PENDING = 100_000  # outputs a gateway may leave unread
_POLICY_VIOLATION, _UNSUPPORTED, _TRY_LATER = 1008, 1003, 1013


class Link:
    """One connected gateway."""

    def __init__(self, feed: BlockFeed) -> None:
        self.feed = feed
        self.generations: set[str] = set()
        self.pending: list[StepOutput] = []
        self.filled = asyncio.Event()
        self.is_slow = False

    def put(self, output: StepOutput) -> None:
        """Queue an output; `flush` wakes the writer."""
        if len(self.pending) >= MAX_PENDING:
            self.is_slow = True
        else:
            self.pending.append(output)

    def flush(self) -> None:
        self.filled.set()


class Links:
    """All connected gateways of this worker."""

    def __init__(
        self,
        engine: EngineThread,
        info: WorkerInfo,
        directory: Directory,
        *,
        secret: str,
        metrics: WorkerMetrics,
        log: Logger,
    ) -> None:
        self.load = Load(0, 0, 0, 0, 0, 0, 0)
        self.rates: Callable[[], WorkerRates] = WorkerRates  # asked whenever the load is reported
        self.is_draining = False
        self._engine = engine
        self._info = info
        self._directory = directory
        self._news = BlockNews(directory, self._tell_blocks)
        self._secret = secret.encode()
        self._metrics = metrics
        self._log = log
        self._links: set[Link] = set()
        self._owner: dict[str, Link] = {}
        self._num_open: dict[str, int] = {}  # unfinished choices by generation
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Until no generation is running."""
        await self._idle.wait()

    def deliver(self, news: StepNews) -> None:
        """Sort a step's outputs by gateway. Called on the loop, once per step."""
        self.load = news.load
        for output in news.outputs:
            link = self._owner.get(output.generation)
            if output.finish is not None:
                self._count_down(output.generation)
            if link is not None:
                link.put(output)
        for link in self._links:
            if link.pending:
                link.flush()
        self._look_if_idle()

    def drain(self) -> None:
        """Take no more generations; tell the gateways so."""
        self.is_draining = True
        for link in self._links:
            link.flush()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One gateway's WebSocket, from handshake to end."""
        await receive()  # websocket.connect
        if not self._is_authorised(scope):
            self._log.warning("link.unauthorised")
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "wrong secret"})
            return
        await send({"type": "websocket.accept"})
        if self._engine.failure is not None:  # the process is about to end: what it took now would die too
            await send({"type": "websocket.close", "code": _TRY_LATER, "reason": "the engine died"})
            return
        link = Link(BlockFeed(self._directory))
        self._links.add(link)
        self._metrics.open_links.inc()
        writer = asyncio.create_task(self._write(link, send))
        reader = asyncio.create_task(self._read(link, receive))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader):
                task.cancel()
            results = await asyncio.gather(writer, reader, return_exceptions=True)
            self._forget(link)
        fault = next((r for r in results if isinstance(r, msgspec.DecodeError | ValueError)), None)
        if fault is not None:
            self._log.warning("link.malformed", reason=str(fault))
            await send({"type": "websocket.close", "code": _UNSUPPORTED, "reason": "malformed message"})
        elif link.is_slow:
            self._log.warning("link.slow", num_pending=len(link.pending))
            await send({"type": "websocket.close", "code": _TRY_LATER, "reason": "outputs are not read"})

    def _is_authorised(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self._secret)

    async def _write(self, link: Link, send: Send) -> None:
        await send(_message(Hello(PROTOCOL, self._info, self._directory.life, takes_forget=True)))
        link.flush()  # the load, and what is held, are news to it
        while not link.is_slow:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await link.filled.wait()
            except TimeoutError:
                pass  # nothing to say: the empty frame below is the heartbeat
            link.filled.clear()
            if not link.pending and not self._engine.is_healthy:
                return  # no heartbeat for an engine that stands still
            outputs, link.pending = link.pending, []
            await send(_message(Frame(outputs, self.report())))
            if link.feed.is_due:
                blocks = link.feed.take()
                if blocks is not None:
                    await send(_message(blocks))
                if link.feed.is_due:
                    link.flush()

    def _tell_blocks(self) -> None:
        for link in self._links:
            link.feed.is_due = True
            link.flush()

    def report(self) -> Load:
        """The load as gateways are told it now."""
        return msgspec.structs.replace(self.load, draining=self.is_draining, rates=self.rates())

    async def _read(self, link: Link, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            command = decode_down(message.get("bytes") or b"")
            match command:
                case Submit(generation):
                    self._submit(link, generation)
                case Abort(generation_id, choice):
                    if self._owner.get(generation_id) is link:
                        self._engine.abort(generation_id, choice)
                case Forget(tenants):
                    self._log.info("kv.forget", num_tenants=len(tenants))
                    self._engine.forget(frozenset(tenants))
                case Resync():
                    link.feed.resync()
                    link.flush()

    def _submit(self, link: Link, generation: Generation) -> None:
        refusal = None
        if self.is_draining:
            refusal = "no_replica: The worker is about to stop."
        elif generation.id in self._owner:
            refusal = "invalid_value: A generation of this id is running."
        if refusal is not None:
            for choice in generation.choices:
                link.put(StepOutput(generation.id, choice, 0, [], Terminal.REFUSED, error=refusal))
            link.flush()
            return
        self._idle.clear()
        self._owner[generation.id] = link
        self._num_open[generation.id] = len(generation.choices)
        link.generations.add(generation.id)
        self._engine.submit(generation)

    def _count_down(self, generation_id: str) -> None:
        left = self._num_open.get(generation_id, 0) - 1
        if left > 0:
            self._num_open[generation_id] = left
            return
        self._num_open.pop(generation_id, None)
        link = self._owner.pop(generation_id, None)
        if link is not None:
            link.generations.discard(generation_id)

    def _forget(self, link: Link) -> None:
        self._links.discard(link)
        self._metrics.open_links.dec()
        for generation_id in tuple(link.generations):
            self._owner.pop(generation_id, None)
            self._num_open.pop(generation_id, None)
            self._engine.abort(generation_id)
        self._look_if_idle()

    def _look_if_idle(self) -> None:
        if not self._owner:
            self._idle.set()


def _message(message: Up) -> Message:
    return {"type": "websocket.send", "bytes": encoder.encode(message)}
