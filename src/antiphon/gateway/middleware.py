"""What every request passes, outermost first: account, errors, host, caller. Pure ASGI.

`AccountMiddleware` opens the account, puts the server's headers on every response and closes the
account on every way out. `ErrorMiddleware` turns whatever is raised below into OpenAI's envelope,
or into the error event of a stream that has begun. `HostMiddleware` refuses a Host header that is
not a host: nothing below builds URLs from it, but proxies and logs do. `CallerMiddleware` finds out
who is asking before any route is looked at: a route is closed unless it is named as open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.core.errors import AntiphonError, BadRequest
from antiphon.gateway.account import Account, account_of, open_account
from antiphon.gateway.callers import Callers
from antiphon.gateway.errors import internal_error, response_of
from antiphon.gateway.sse import error_event
from antiphon.obs.log import Logger
from antiphon.obs.metrics import GatewayMetrics

_OPEN = frozenset({"/health", "/health/", "/metrics", "/metrics/"})  # as the routes spell them
_HOST = re.compile(rb"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class AccountMiddleware:
    """One account, one `x-request-id`, one log line a request."""

    def __init__(self, app: ASGIApp, log: Logger, metrics: GatewayMetrics) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = open_account(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if account.before_answer is not None and message["status"] < 400:
                    await account.before_answer()
                account.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(account)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # by the server, which stops
            account.error_code = account.error_code or "cancelled"
            raise
        finally:
            route = scope.get("route")
            account.route = route.name if route is not None else "other"
            account.close(self._log, self._metrics)


class ErrorMiddleware:
    """Answers what is raised below. Nothing raised leaves it but cancellation."""

    def __init__(self, app: ASGIApp, log: Logger) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = account_of(scope)
        try:
            await self._app(scope, receive, send)
        except AntiphonError as error:
            await self._answer(error, account, scope, send)
        except Exception:  # noqa: BLE001 - the gateway's handler: a fault of ours is logged and answered
            self._log.exception("request.fault", request_id=account.request_id)
            await self._answer(internal_error(), account, scope, send)

    async def _answer(self, error: AntiphonError, account: Account, scope: Scope, send: Send) -> None:
        account.error_code = error.code
        account.dropped_reason = error.dropped_reason
        if account.is_client_gone:
            return
        if account.status is None:
            await response_of(error)(scope, _nothing_to_receive, send)
        elif account.is_stream:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": False})


class HostMiddleware:
    """Host must be one plain `name[:port]`; HTTP/1.0 may come without."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            is_good = len(hosts) == 1 and _HOST.fullmatch(hosts[0]) is not None
            if not is_good and (hosts or scope["http_version"] != "1.0"):
                raise BadRequest("The Host header is not a host name.", code="invalid_host")
        await self._app(scope, receive, send)


class CallerMiddleware:
    """Every request has a caller, except where only the process's own state is asked for."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            account_of(scope).caller = await self._callers.identify(scope)
        await self._app(scope, receive, send)


def _headers(account: Account) -> Iterable[tuple[bytes, bytes]]:
    yield b"x-request-id", account.request_id.encode()
    yield b"openai-version", b"2020-10-01"
    yield b"openai-processing-ms", str(round(1000 * account.elapsed_s)).encode()
    yield b"x-content-type-options", b"nosniff"
    if account.model is not None:
        yield b"x-antiphon-model", account.model.encode("ascii", "backslashreplace")
    yield from account.headers
    if account.told_route:
        yield b"x-antiphon-route", account.told_route.encode("ascii", "replace")


async def _nothing_to_receive() -> Message:
    return {"type": "http.disconnect"}
