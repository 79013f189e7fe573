"""The worker's one port: `/link` (WebSocket), `/healthz`, `/metrics`. Plain ASGI.

`/healthz` says 200 only while the engine makes progress, so that a hung step is seen from outside.
"""

from __future__ import annotations

import msgspec

from antiphon.obs.metrics import CONTENT_TYPE, WorkerMetrics
from antiphon.worker.enginethread import EngineThread
from antiphon.worker.links import Links, Receive, Scope, Send

_JSON = "application/json"


class WorkerApp:
    """The ASGI application of a worker process."""

    def __init__(self, engine: EngineThread, links: Links, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._links = links
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if scope["type"] == "websocket":
            if path == "/link":
                await self._links.serve(scope, receive, send)
            else:
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": "the path is /link"})
        elif scope["type"] == "http":
            await self._http(path, send)

    async def _http(self, path: str | None, send: Send) -> None:
        if path == "/healthz":
            healthy = self._engine.is_healthy and not self._links.is_draining
            body = {"healthy": healthy, "draining": self._links.is_draining, "load": self._links.load}
            await _respond(send, 200 if healthy else 503, _JSON, msgspec.json.encode(body))
        elif path == "/metrics":
            await _respond(send, 200, CONTENT_TYPE, self._metrics.render())
        else:
            await _respond(send, 404, _JSON, b'{"error":"there are /link, /healthz and /metrics"}')


async def _respond(send: Send, status: int, content_type: str, body: bytes) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
