"""A loopback server that plays back bytes, in pieces of any size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TypeAlias

import pytest
from bench.client import Target

Playback: TypeAlias = Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]]


@pytest.fixture
def playback() -> Playback:
    """A server on loopback that writes the given pieces to every connection, then closes it.

    An empty piece means: keep the connection open until the test ends.
    """

    @asynccontextmanager
    async def serve(pieces: Sequence[bytes]) -> AsyncIterator[Target]:
        released = asyncio.Event()
        handlers: set[asyncio.Task[None]] = set()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):  # the client gives up some answers in the middle
                try:
                    await reader.readuntil(b"\r\n\r\n")
                    for piece in pieces:
                        if not piece:
                            await released.wait()
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                finally:
                    writer.close()
                    await writer.wait_closed()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.add(asyncio.create_task(answer(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield Target(f"http://127.0.0.1:{port}")
        finally:
            released.set()
            server.close()
            await asyncio.gather(*handlers)

    return serve
