"""The gateway's ASGI application: its routes and the order of what surrounds them.

A trailing slash and a doubled `/v1` (a base URL with `/v1` in a client that adds one) are routes of
their own: paths are matched as they came, never rewritten. Holds no state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.gateway.access import Access, Guarded
from antiphon.gateway.admin import Admin
from antiphon.gateway.admission import Admission
from antiphon.gateway.callers import Callers
from antiphon.gateway.chat import ChatCompletions
from antiphon.gateway.completions import Completions
from antiphon.gateway.desk import Desk
from antiphon.gateway.errors import raise_ours
from antiphon.gateway.middleware import AccountMiddleware, CallerMiddleware, ErrorMiddleware, HostMiddleware
from antiphon.gateway.minting import MintClientToken
from antiphon.gateway.models import ListModels, ServedModels, ShowModel
from antiphon.gateway.openapi import openapi_document
from antiphon.gateway.reply import Health
from antiphon.obs.metrics import CONTENT_TYPE, GatewayMetrics
from antiphon.router.dispatch import Dispatcher
from antiphon.router.signals import signals
from antiphon.router.upstreams import Upstreams


class Fixed:
    """A route that always says the same."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(self._body, media_type="application/json")(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Gauges:
    """The metrics, and whom to ask for what only they know."""

    metrics: GatewayMetrics
    dispatcher: Dispatcher
    upstreams: Upstreams
    admission: Admission

    def render(self) -> bytes:
        """All of it as it is now."""
        self.metrics.worker_up.clear()  # a worker that was removed has no line
        links = self.dispatcher.fleet.links
        for link in links:
            self.metrics.worker_up.labels(link.url).set(link.is_up)
        self._measure_fleet()
        self.dispatcher.directory_watch.measure(self.metrics.directory, links)
        self.metrics.open_answers.set(sum(link.num_open_answers for link in links))
        self.upstreams.measure()
        self.admission.measure()
        return self.metrics.render()

    def _measure_fleet(self) -> None:
        scale = self.metrics.scale
        scale.clear()
        for (model, role), now in signals(self.dispatcher.fleet.links).items():
            scale.workers.labels(model, role).set(now.num_workers)
            num_tokens, wait_s = self.admission.backlog(model)  # here, before any worker has them
            scale.queue_tokens.labels(model, role).set(now.queue_tokens + num_tokens)
            scale.running.labels(model, role).set(now.running)
            scale.kv_pressure.labels(model, role).set(now.kv_pressure)
            scale.wait_s.labels(model, role).set(now.wait_s + wait_s)


class Metrics:
    """GET /metrics. What only others know is asked for at each scrape."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(self._gauges.render(), media_type=CONTENT_TYPE)(scope, receive, send)


def build_app(desk: Desk, models: ServedModels, callers: Callers, gauges: Gauges, admin: Admin) -> Starlette:
    """All routes behind all middleware."""
    document, health = msgspec.json.encode(openapi_document()), msgspec.json.encode(Health())
    routes = [
        *_v1("/chat/completions", "POST", Guarded(ChatCompletions(desk), Access.CLIENT)),
        *_v1("/completions", "POST", Guarded(Completions(desk), Access.CLIENT)),
        *_v1("/models", "GET", Guarded(ListModels(models), Access.CLIENT)),
        *_v1("/models/{model:path}", "GET", Guarded(ShowModel(models), Access.CLIENT)),
        *_v1("/client_tokens", "POST", Guarded(MintClientToken(callers.tokens, models), Access.KEY)),
        *_admin("/usage", "GET", admin.totals),
        *_admin("/usage/requests", "GET", admin.requests),
        *_admin("/keys", "GET POST", admin.keys),
        *_admin("/keys/{key_id}", "PATCH DELETE", admin.key),
        *_admin("/tenants", "GET POST", admin.tenants),
        *_both("/openapi.json", "/openapi.json", "GET", Guarded(Fixed(document), Access.CALLER)),
        *_both("/health", "/health", "GET", Guarded(Fixed(health), Access.OPEN)),
        *_both("/metrics", "/metrics", "GET", Guarded(Metrics(gauges), Access.OPEN)),
    ]
    middleware = [
        *callers.origins.middleware(),
        Middleware(AccountMiddleware, log=desk.log, metrics=gauges.metrics),
        Middleware(ErrorMiddleware, log=desk.log),
        Middleware(HostMiddleware),
        Middleware(CallerMiddleware, callers=callers),
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: raise_ours})
    app.router.redirect_slashes = False
    return app


def _v1(path: str, method: str, endpoint: Guarded) -> list[Route]:
    name = f"/v1{path}"
    return [*_both(name, name, method, endpoint), *_both(f"/v1{name}", name, method, endpoint)]


def _admin(path: str, methods: str, endpoint: ASGIApp) -> list[Route]:
    name = f"/admin{path}"
    return _both(name, name, methods, Guarded(endpoint, Access.ADMIN))


def _both(path: str, name: str, methods: str, endpoint: Guarded) -> list[Route]:
    return [Route(p, endpoint, methods=methods.split(), name=name) for p in (path, f"{path}/")]
