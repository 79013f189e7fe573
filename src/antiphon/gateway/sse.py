"""Event streams: framing, silence, and the watch for a client that leaves.

An event is `data: ` and one line of JSON in pure ASCII, so that no client splits it at a line
separator. All events that one engine step brings for a stream leave in one write. After `idle_s`
of silence a comment goes out, with a single newline: clients that dispatch an event at each blank
line must not see one. Nothing is written before the first event or the first silence, so what
fails earlier is still a plain HTTP error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from starlette.types import Receive, Send

from antiphon.core.errors import AntiphonError
from antiphon.gateway.errors import envelope
from antiphon.gateway.text import Piece

KEEP_ALIVE = b": keep-alive\n"
KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChunkWriter(Protocol):
    """What makes the events of one API out of pieces of text."""

    def opening(self) -> bytes:
        """Events before the first piece."""
        ...

    def chunk(self, piece: Piece) -> bytes:
        """Events of one piece, its end included."""
        ...

    def closing(self) -> bytes:
        """Events after the last piece and before the end mark."""
        ...


def event(data: msgspec.Struct) -> bytes:
    """One event. ASCII only: `json` escapes what msgspec would leave."""
    text = json.dumps(msgspec.to_builtins(data), separators=(",", ":"))
    return b"data: " + text.encode("ascii") + b"\n\n"


def error_event(error: AntiphonError) -> bytes:
    """What a stream that cannot go on says last. No end mark follows, so the mark always means success."""
    return event(envelope(error))


async def send_events(pieces: AsyncIterator[Sequence[Piece]], writer: ChunkWriter, send: Send) -> None:
    """Write a whole stream. An empty batch stands for silence. Raises what `pieces` raises."""
    is_begun = is_opened = False
    async for batch in pieces:
        if not is_begun:
            is_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        if not batch:
            body = KEEP_ALIVE
        elif len(batch) == 1 and is_opened:
            body = writer.chunk(batch[0])
        else:
            opening = b"" if is_opened else writer.opening()
            is_opened = True
            body = opening + b"".join(map(writer.chunk, batch))
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": writer.closing() + DONE, "more_body": False})


@asynccontextmanager
async def watch_client(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_gone` as soon as the client leaves. The request's body must have been read."""
    watcher = asyncio.create_task(_until_gone(receive, on_gone), name="watch client")
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _until_gone(receive: Receive, on_gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
