"""One server that answers for us: the connections to it, its bounds, its health.

A call is one streamed request. Invariants: a call counts from before it is sent until its connection
is given back or closed, on every way out; no more than `max_in_flight` at once; nothing waits longer than the
entry allows; no more than one event is held; the first fault ends the call and its connection. A pooled
connection lives shorter than servers keep theirs open; where one was closed all the same, before a
byte of the answer came, the request is sent once more. The only headers sent are ours.

Knows no text: what events mean is the caller's business, who says with `heard` that a token came.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self, TypeVar

import httpx2

from antiphon.core.catalogue import ModelEntry, UpstreamEntry
from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest, Busy, NoReplica, UpstreamFault
from antiphon.obs.log import Logger
from antiphon.obs.metrics import UpstreamMetrics
from antiphon.router.upstreamerrors import log_code, of_response, senseless, too_slow, unreachable
from antiphon.router.upstreamhealth import UpstreamHealth
from antiphon.router.upstreamsse import SseFault, SseParser

DONE = b"[DONE]"
POOL_IDLE_S = 3.0  # servers close theirs after 5 s or more
MAX_ERROR_BYTES = 64 * 1024
ERROR_BODY_TIMEOUT_S = 5.0
LAST_WORDS_S = 0.25  # from the end mark to the end of the response
_EVENTS = "text/event-stream"
_LOST = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError, httpx2.CloseError)

Outcome = Literal["ok", "aborted", "busy", "refused", "denied", "fault"]
T = TypeVar("T")


class Upstream:
    """A server as this gateway sees it. Owned by one event loop; `close` it."""

    def __init__(
        self,
        entry: ModelEntry,
        key: str | None,
        metrics: UpstreamMetrics,
        clock: Clock,
        log: Logger,
        draw: Callable[[], float] = random.random,
    ) -> None:
        assert entry.upstream is not None
        self.name = entry.name
        self.settings: UpstreamEntry = entry.upstream
        self.model = entry.upstream.model or entry.name  # as it is called there
        self.health = UpstreamHealth(draw)
        self.num_in_flight = 0
        self._metrics = metrics
        self._clock = clock
        self.log = log.bind(upstream=entry.name)
        headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "user-agent": "antiphon-gateway",
        }
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        most = self.settings.max_in_flight
        self._client = httpx2.AsyncClient(
            headers=headers,
            limits=httpx2.Limits(
                max_connections=most, max_keepalive_connections=most, keepalive_expiry=POOL_IDLE_S
            ),
            timeout=httpx2.Timeout(self.settings.connect_timeout_s, read=None),
            trust_env=False,
        )

    def call(self, url: str, body: bytes) -> UpstreamCall:
        """A request to be made: enter it."""
        return UpstreamCall(self, url, body)

    def salt_of(self, scope: bytes) -> str | None:
        """What keeps the KV of one scope apart there. Tells nothing of the scope, a secret of ours."""
        if not self.settings.salts:
            return None
        parts = (b"antiphon upstream salt", self.name.encode(), scope)
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, url: str, body: bytes) -> httpx2.Response:
        """Send a request, and once more where a connection that was reused had been closed by its server."""
        is_fresh = False

        async def trace(name: str, info: object) -> None:
            nonlocal is_fresh
            is_fresh = is_fresh or name == "connection.connect_tcp.started"

        request = self._client.build_request(
            "POST",
            url,
            content=body,
            headers={"content-type": "application/json"},
            extensions={"trace": trace},
        )
        try:
            return await self._client.send(request, stream=True)
        except _LOST:
            if is_fresh:
                raise
        self.log.debug("upstream.resent")
        return await self._client.send(request, stream=True)

    def begin(self) -> None:
        """A call begins. Raises Busy, NoReplica."""
        if self.num_in_flight >= self.settings.max_in_flight:
            self._metrics.requests.labels(self.name, "full").inc()
            raise Busy(f"The server behind the model {self.name!r} is busy; try again shortly.")
        now_s = self._clock.now()
        if not self.health.may_try(now_s):
            self._metrics.requests.labels(self.name, "aside").inc()
            raise unreachable(self.name, self.health.retry_after_s(now_s))
        self.num_in_flight += 1

    def end(self, outcome: Outcome, *, has_spoken: bool) -> None:
        """A call ended like this."""
        self.num_in_flight -= 1
        self._metrics.requests.labels(self.name, outcome).inc()
        was_aside = self.health.is_aside
        if outcome == "fault":
            self.health.fail(self._clock.now())
        elif has_spoken or outcome in ("ok", "refused"):
            self.health.succeed()
        else:
            self.health.excuse()
        if self.health.is_aside and not was_aside:
            self.log.warning("upstream.aside", retry_s=round(self.health.retry_after_s(self._clock.now()), 1))
        elif was_aside and not self.health.is_aside:
            self.log.info("upstream.back")

    def first_token(self, after_s: float) -> None:
        """A call brought its first token."""
        self._metrics.ttft_s.labels(self.name).observe(after_s)


class UpstreamCall:
    """One streamed request. Iterate over the data of its events; the end mark is not among them.

    Inside the block errors of the network become errors of ours.
    """

    def __init__(self, upstream: Upstream, url: str, body: bytes) -> None:
        self._upstream = upstream
        self._url = url
        self._body = body
        self._response: httpx2.Response | None = None
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._patience_s = upstream.settings.first_token_timeout_s  # of waiting, until the next token comes
        self._has_spoken = False
        self._is_denied = False

    def heard(self) -> None:
        """A token came: patience begins anew."""
        if not self._has_spoken:
            self._has_spoken = True
            self._upstream.first_token(self._loop.time() - self._begun_s)
        self._patience_s = self._upstream.settings.silence_timeout_s

    async def __aenter__(self) -> Self:
        """Send it. Raises Busy, NoReplica, BadRequest, UpstreamFault."""
        self._upstream.begin()
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self)  # left again where one of the next two fails
            self._response = await self._patiently(self._upstream.send(self._url, self._body))
            await self._check(self._response)
            stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert self._response is not None
        parser = SseParser()
        received = self._response.aiter_raw()
        while True:
            try:
                events = parser.feed(await self._patiently(anext(received)))
            except StopAsyncIteration:
                break
            for data in events:
                if data.startswith(DONE):
                    await self._read_out(received)
                    return
                yield data
        for data in parser.finish():
            if not data.startswith(DONE):
                yield data

    async def _patiently(self, awaited: Awaitable[T]) -> T:
        """Wait, for as long as patience lasts. Time in which nobody waits does not count."""
        begun_s = self._loop.time()
        try:
            async with asyncio.timeout(max(self._patience_s, 0.0)):
                return await awaited
        except TimeoutError:
            self._upstream.log.warning("upstream.silent", spoke=self._has_spoken)
            raise too_slow(self._upstream.name) from None
        finally:
            self._patience_s -= self._loop.time() - begun_s

    async def _check(self, response: httpx2.Response) -> None:
        """Raises what the head of the response says."""
        name, headers, status = self._upstream.name, response.headers, response.status_code
        if status != 200:
            body = await _beginning(response)
            error = of_response(name, status, headers.get("retry-after"), body)
            self._is_denied = 400 <= status < 500 and isinstance(error, UpstreamFault)
            say = self._upstream.log.error if self._is_denied else self._upstream.log.warning
            if not isinstance(error, BadRequest):
                say("upstream.failed", status=status, code=log_code(body))
            raise error
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != _EVENTS or headers.get("content-encoding", "identity") != "identity":
            raise SseFault("a response that is no plain stream of events")

    async def _read_out(self, received: AsyncIterator[bytes]) -> None:
        """Read to the end of the response, so that its connection can be used again."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while not (await anext(received)).strip():
                    pass
            self._upstream.log.debug("upstream.talks_on")
        except (StopAsyncIteration, TimeoutError, *_LOST):
            pass  # what is not read out is closed

    async def _leave(self, error: BaseException | None) -> None:
        """Give everything back. Raises an error of ours for one of the network's."""
        try:
            if self._response is not None:
                await self._response.aclose()
        except _LOST:
            pass  # closed, whatever it said
        finally:
            translated = self._translated(error)
            self._upstream.end(self._outcome(translated), has_spoken=self._has_spoken)
        if translated is not None and translated is not error:
            raise translated from error

    def _translated(self, error: BaseException | None) -> BaseException | None:
        name = self._upstream.name
        if isinstance(error, SseFault | httpx2.TransportError):
            is_reached = self._response is not None
            self._upstream.log.warning(
                "upstream.fault", reached=is_reached, kind=type(error).__name__, spoke=self._has_spoken
            )
            return senseless(name) if is_reached else unreachable(name)
        return error

    def _outcome(self, error: BaseException | None) -> Outcome:
        match error:
            case None:
                return "ok"
            case Busy():
                return "busy"
            case BadRequest():
                return "refused"
            case UpstreamFault() | NoReplica():
                return "denied" if self._is_denied else "fault"
            case _:
                return "aborted"


async def _beginning(response: httpx2.Response) -> bytes:
    """As much of an error's body as is worth reading."""
    body = b""
    try:
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            async for part in response.aiter_raw():
                body += part
                if len(body) >= MAX_ERROR_BYTES:
                    break
    except (TimeoutError, *_LOST):
        pass  # its status says enough
    return body[:MAX_ERROR_BYTES]
