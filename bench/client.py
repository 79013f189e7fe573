"""One completion over HTTP, streamed or whole, as cheaply as Python can do it.

The client shares the machine's cores with the servers it measures, so it does as little as it can per
event: httptools cuts the HTTP, lines are cut by hand, JSON is read until the first token and at the end.
One connection per answer, closed afterwards; the connect counts into TTFT, for every server alike.

An answer is right when its status is 200, a stream's `[DONE]` came and the usage names the expected token
counts. An answer that is no stream comes as one event.
`Answer.fault` says in words what was wrong; the caller decides whether that ends the bench.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

LEFT = "the client left"
_KEPT_EVENTS = 3  # the last ones: finish, usage and what a server puts between


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, and what every one of them carries."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load: when it is due, what it says, what must come back."""

    at_s: float
    path: str
    body: bytes
    num_tokens: int | None = None  # answer tokens that must come; None: not checked
    keeps_events: bool = False  # whether the answer holds the data of all its events
    leaves_after: int | None = None  # events with text, after which the client hangs up


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds since the load's start; TTFT counts from the due time."""

    at_s: float
    first_s: float | None = None
    last_s: float | None = None
    status: int = 0
    num_events: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    fault: str | None = None
    events: list[bytes] = field(default_factory=list)
    event_s: list[float] = field(default_factory=list)  # when each of them came
    gaps_s: list[float] = field(default_factory=list)  # from each event with text to the next one
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of the response, names in small letters
    sent_s: float = 0.0  # when it left: later than `at_s` where the client itself was late
    ended_s: float = 0.0  # when its last byte had come, or was waited for no longer

    @property
    def ttft_s(self) -> float:
        """Seconds from the moment the request was due to its first token."""
        return float("nan") if self.first_s is None else self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return float("nan")
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None

    @property
    def has_text(self) -> bool:
        saying = ((c.text, c.delta or c.message) for c in self.choices)
        return any(text or (said is not None and said.content) for text, said in saying)


@dataclass(slots=True)
class EventReader:
    """Cuts a server-sent event stream, split anywhere, into the data of its events."""

    _rest: bytes = b""

    def push(self, data: bytes) -> list[bytes]:
        """The data lines completed by these bytes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class _Exchange(asyncio.Protocol):
    """Protocol of one connection: sends the request, fills the answer, resolves `ended`."""

    request: bytes
    answer: Answer
    started_s: float
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[None]
    recent: deque[bytes]
    leaves_after: int | None
    events: EventReader = field(default_factory=EventReader)
    whole: bytes = b""  # the body of a response that is no stream: an answer, or why there is none
    done: bool = False
    now_s: float = 0.0
    parser: httptools.HttpResponseParser = field(init=False)
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.now_s = self.loop.time() - self.started_s
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP, or not JSON in it: {error.__context__ or error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        if not self.answer.status:
            self.answer.status = self.parser.get_status_code()
        if self.answer.status != 200 or self.is_whole:
            self.whole += body
            return
        for data in self.events.push(body):
            if data == b"[DONE]":
                self.done = True
            else:
                self._event(data)

    def _event(self, data: bytes) -> None:
        answer = self.answer
        if self.recent.maxlen is None:
            answer.event_s.append(self.now_s)
        if answer.first_s is None:
            if not msgspec.json.decode(data, type=_Event).has_text:
                self.recent.append(data)
                return
            answer.first_s = answer.last_s = self.now_s
        else:
            answer.gaps_s.append(self.now_s - (answer.last_s or self.now_s))
        answer.num_events += 1
        answer.last_s = self.now_s
        self.recent.append(data)
        if answer.num_events == self.leaves_after:
            self._end(LEFT)

    @property
    def is_whole(self) -> bool:
        return self.answer.headers.get(b"content-type", b"").startswith(b"application/json")

    def on_message_complete(self) -> None:
        if not self.answer.status:
            self.answer.status = self.parser.get_status_code()
        if self.answer.status == 200 and self.is_whole:
            self.done = True
            self._event(self.whole)
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost before the end ({exc or 'closed by the server'})")

    def _end(self, fault: str | None) -> None:
        if not self.ended.done():
            self.answer.fault = fault
            self.ended.set_result(None)
        if self.transport is not None:
            self.transport.close()

    def judge(self, expected: int | None) -> None:
        """Read the last events and say what was wrong, if anything was."""
        answer = self.answer
        for data in self.recent:
            event = msgspec.json.decode(data, type=_Event)
            if event.error is not None:
                answer.fault = f"error event: {str(event.error)[:300]}"
            if event.usage is not None:
                details = event.usage.prompt_tokens_details
                answer.num_prompt_tokens = event.usage.prompt_tokens
                answer.num_tokens = event.usage.completion_tokens
                answer.num_cached = details.cached_tokens if details else 0
        if answer.fault is None:
            answer.fault = self._wrong(expected)

    def _wrong(self, expected: int | None) -> str | None:
        answer = self.answer
        if answer.status != 200:
            return f"status {answer.status}: {self.whole[:500].decode(errors='replace')}"
        if not self.done:
            return "the stream ended without [DONE]"
        if answer.first_s is None:
            return "no token came"
        if expected is not None and answer.num_tokens != expected:
            return f"{answer.num_tokens} tokens came, not {expected}"
        return None


def encode(target: Target, request: Request) -> bytes:
    """The request's bytes on the wire."""
    host, port = target.address
    head = [f"POST {request.path} HTTP/1.1", f"host: {host}:{port}", "content-type: application/json"]
    head += [f"content-length: {len(request.body)}", *(f"{k}: {v}" for k, v in target.headers)]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + request.body


async def send(target: Target, request: Request, started_s: float, limit_s: float) -> Answer:
    """Send one request and read its answer to the end. Never raises for what the server does."""
    loop = asyncio.get_running_loop()
    answer = Answer(at_s=request.at_s)
    recent: deque[bytes] = deque(maxlen=None if request.keeps_events else _KEPT_EVENTS)
    ended = loop.create_future()
    leaves_after = request.leaves_after
    exchange = _Exchange(encode(target, request), answer, started_s, loop, ended, recent, leaves_after)
    answer.sent_s = loop.time() - started_s
    try:
        async with asyncio.timeout(limit_s):
            await loop.create_connection(lambda: exchange, *target.address)
            await ended
        exchange.judge(request.num_tokens)
    except TimeoutError:
        answer.fault = f"no end within {limit_s:g} s"
    except (OSError, msgspec.DecodeError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    finally:
        answer.ended_s = loop.time() - started_s
        answer.events = list(recent) if request.keeps_events else []
        if exchange.transport is not None:
            exchange.transport.abort()
    return answer
