"""The worker's one port: `/link` (WebSocket), `/healthz`, `/metrics`, `/kv` and `/kv/held`. Plain ASGI.

`/healthz` says 200 only while the engine makes progress, so that a hung step is seen from outside.
The `/kv` pages tell what was cached here: they want the secret that gateways know.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

import msgspec

from antiphon.core.generation import WorkerInfo
from antiphon.core.kvblock import Tier
from antiphon.kv.cache import KvCache
from antiphon.obs.metrics import CONTENT_TYPE, WorkerMetrics
from antiphon.worker.enginethread import EngineThread
from antiphon.worker.kvinfo import KvHeld, KvInfo
from antiphon.worker.kvmeter import KvMeter
from antiphon.worker.links import Links, Receive, Scope, Send
from antiphon.worker.meter import measure

_JSON = "application/json"
_HELD_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker process is made of, as its port shows it."""

    engine: EngineThread
    links: Links
    metrics: WorkerMetrics
    info: WorkerInfo
    secret: str
    kv: KvCache | None


class WorkerApp:
    """The ASGI application of a worker process."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._kv_meter = KvMeter(parts.metrics.kv)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if scope["type"] == "websocket":
            if path == "/link":
                await self._parts.links.serve(scope, receive, send)
            else:
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": "the path is /link"})
        elif scope["type"] == "http":
            await self._http(path, scope, send)

    async def _http(self, path: str | None, scope: Scope, send: Send) -> None:
        parts = self._parts
        if path == "/healthz":
            healthy = parts.engine.is_healthy and not parts.links.is_draining
            body = {"healthy": healthy, "draining": parts.links.is_draining, "load": parts.links.load}
            await _respond(send, 200 if healthy else 503, _JSON, msgspec.json.encode(body))
        elif path == "/metrics":
            if parts.kv is not None:
                self._kv_meter.take(parts.kv.stats())
            measure(parts.metrics.scale, parts.info, parts.links.report())
            await _respond(send, 200, CONTENT_TYPE, parts.metrics.render())
        elif path in ("/kv", "/kv/held"):
            await self._kv(path, scope, send)
        else:
            text = b'{"error":"there are /link, /healthz, /metrics, /kv and /kv/held"}'
            await _respond(send, 404, _JSON, text)

    async def _kv(self, path: str, scope: Scope, send: Send) -> None:
        parts = self._parts
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, b"Bearer " + parts.secret.encode()):
            await _respond(send, 401, _JSON, b'{"error":"the secret of gateways and workers is needed"}')
        elif parts.kv is None:
            await _respond(send, 404, _JSON, b'{"error":"there are no KV tiers behind this engine"}')
        elif path == "/kv":
            page = KvInfo(
                worker=parts.info.worker,
                model=parts.info.model,
                namespace=parts.info.namespace,
                block_tokens=parts.info.block_tokens,
                stats=parts.kv.stats(),
            )
            await _respond(send, 200, _JSON, msgspec.json.encode(page))
        else:
            await self._held(parts.kv, send)

    async def _held(self, kv: KvCache, send: Send) -> None:
        try:
            in_engine = await asyncio.wait_for(self._parts.engine.held_hashes(), _HELD_TIMEOUT_S)
        except TimeoutError:
            await _respond(send, 503, _JSON, b'{"error":"the engine is busy with a long step"}')
            return
        in_host = kv.directory.snapshot().hashes[Tier.HOST]
        held = KvHeld(engine=[h.hex() for h in in_engine], host=[h.hex() for h in in_host])
        await _respond(send, 200, _JSON, msgspec.json.encode(held))


async def _respond(send: Send, status: int, content_type: str, body: bytes) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
