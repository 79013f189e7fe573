"""An OpenAI-compatible server whose every byte a test decides: plain asyncio on loopback.

Speaks HTTP/1.1 with keep-alive. A `Reply` is a head and a list of parts: bytes that are sent, or events
that are waited for. Records what was asked, on which connection, and who closed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.catalogue import ModelEntry, UpstreamEntry
from support.gateways import Gateway, gateway_to

KEY_ENV = "UPSTREAM_KEY"
KEY = "sk-upstream-0123456789"
EVENTS = "text/event-stream"
Part = bytes | asyncio.Event


@dataclass
class Reply:
    """What is answered to one request."""

    parts: Sequence[Part] = ()
    status: int = 200
    content_type: str = EVENTS
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False  # close the connection without the last chunk
    endless: bytes = b""  # said again and again after the parts, until the client leaves


@dataclass
class Asked:
    """One request as it came."""

    connection: int
    path: str
    headers: list[tuple[str, str]]
    body: dict[str, Any]

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


class UpstreamServer:
    """The server. It answers with `replies` in turn, the last one again and again."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies) or [says("hello")]
        self.asked: list[Asked] = []
        self.left: asyncio.Queue[int] = asyncio.Queue()  # connections that the client closed during an answer
        self.arrived: asyncio.Queue[Asked] = asyncio.Queue()
        self.drops_next_reused = False  # close a connection when its second request comes
        self.drops_all = False  # close every connection when a request comes
        self.num_connections = 0
        self.num_open = 0
        self.num_sent = 0  # bytes of parts
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def entry(self, name: str = "far", **fields: Any) -> ModelEntry:
        """A catalogue entry for it."""
        public = fields.pop("public", True)
        upstream = UpstreamEntry(**({"url": self.url, "model": "far-model", "api_key_env": KEY_ENV} | fields))
        return ModelEntry(name=name, engine="openai", public=public, upstream=upstream)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[UpstreamServer]:
        """Listen until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            yield self
        finally:
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        self.num_open += 1
        number = self.num_connections
        try:
            while (asked := await _read(reader, number)) is not None:
                if self.drops_all:
                    return
                if self.drops_next_reused and any(a.connection == number for a in self.asked):
                    self.drops_next_reused = False
                    return
                self.asked.append(asked)
                self.arrived.put_nowait(asked)
                if not await self._answer(reader, writer, number):
                    return
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        """Send the reply; whether the connection lives on. Notices a client that leaves at any time."""
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        sending = asyncio.create_task(self._send(writer, reply))
        leaving = asyncio.create_task(reader.read(1))  # nobody pipelines: a byte less is an end
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not sending.done():
                self.left.put_nowait(number)
                return False
            error = sending.exception()
            if error is not None:
                self.left.put_nowait(number)
            if error is not None or reply.is_cut:
                return False
        finally:
            sending.cancel()
            if not leaving.done():
                leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        return not leaving.done() or leaving.cancelled()

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        headers = {"content-type": reply.content_type, "transfer-encoding": "chunked"} | reply.headers
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for part in reply.parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                await self._chunk(writer, part)
        while reply.endless:
            await self._chunk(writer, reply.endless)
        if not reply.is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
        await writer.drain()
        self.num_sent += len(data)


@contextlib.asynccontextmanager
async def in_front_of(server: UpstreamServer, **fields: Any) -> AsyncIterator[Gateway]:
    """A gateway without workers whose model `far` is this server; it listens inside the block."""
    settings = {name: fields.pop(name) for name in ("request_timeout_s", "queue") if name in fields}
    async with contextlib.AsyncExitStack() as stack:
        if not server.port:
            await stack.enter_async_context(server.running())
        models = (server.entry(**fields),)
        yield await stack.enter_async_context(
            gateway_to(models=models, upstream_keys={KEY_ENV: KEY}, **settings)
        )


async def _read(reader: asyncio.StreamReader, number: int) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head.strip().split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (each.partition(":") for each in lines)]
    body = await reader.readexactly(int(dict(headers).get("content-length", "0")))
    return Asked(number, line.split()[1], headers, json.loads(body) if body else {})


def data(value: object) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str | None = None, *, index: int = 0, finish: str | None = None, **fields: object) -> bytes:
    """One chat event of one choice."""
    content = {} if text is None else {"content": text}
    choice = {"index": index, "delta": content, "finish_reason": finish} | fields
    return data({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})


def usage(prompt: int = 7, completion: int = 5, cached: int = 3) -> bytes:
    """The event with the count."""
    details = {"cached_tokens": cached}
    count = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return data({"choices": [], "usage": count})


DONE = b"data: [DONE]\n\n"


def says(*texts: str, finish: str = "stop") -> Reply:
    """A whole good answer in these pieces."""
    return Reply([delta(""), *(delta(text) for text in texts), delta(finish=finish), usage(), DONE])


def fails(status: int, message: str = "no", **fields: object) -> Reply:
    """An answer with OpenAI's error envelope; a `retry_after` becomes a header."""
    retry = {"retry-after": str(fields.pop("retry_after"))} if "retry_after" in fields else {}
    body = {"error": {"message": message, "type": "some_type", "param": None, "code": None} | fields}
    return Reply([json.dumps(body).encode()], status, "application/json", retry)
