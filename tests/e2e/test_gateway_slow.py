"""F26: clients that bring their request a byte at a time, or a head without an end, hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from antiphon.gateway import heads
from support.gateways import Gateway, gateway
from support.loopback import LoopbackWorker, saying

HEAD_TIMEOUT_S = 0.4


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are waited for shortly."""
    monkeypatch.setattr(heads, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)


async def drip(running: Gateway, head: bytes) -> bytes:
    """Send a head a byte at a time until the server has had enough; what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    answer = asyncio.create_task(reader.read())
    try:
        with contextlib.suppress(ConnectionError):
            for byte in head:
                writer.write(bytes([byte]))
                await writer.drain()
                if answer in (await asyncio.wait([answer], timeout=0.05))[0]:
                    break
        async with asyncio.timeout(10):
            return await answer
    except ConnectionError:
        return b""
    finally:
        answer.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_slow_heads_end_and_others_are_served() -> None:
    """A hundred dripping connections are closed unanswered; meanwhile everybody else gets answers."""
    async with gateway(LoopbackWorker(saying(b"hello"))) as running:
        drips = [
            asyncio.create_task(drip(running, b"GET /health HTTP/1.1\r\n" + b"a" * 10_000))
            for _ in range(100)
        ]
        while not all(drip.done() for drip in drips):
            await running.proves_alive()
            await asyncio.sleep(0.05)
        assert {drip.result() for drip in drips} == {b""}
        await running.proves_alive()


async def test_silent_connections_end() -> None:
    """Also one that never says a word."""
    async with gateway(LoopbackWorker(saying(b"hello"))) as running:
        assert await running.raw(b"") == b""


async def test_a_second_head_has_its_time_from_its_first_byte() -> None:
    """A connection that is kept may rest for longer than a head may take; then the next head counts."""
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with gateway(LoopbackWorker(saying(b"hello"))) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(2):
            writer.write(health)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.read(4096)
            await asyncio.sleep(1.5 * HEAD_TIMEOUT_S)
        writer.write(health[:20])
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_head_without_an_end_is_refused() -> None:
    """The byte beyond the bound is answered with 400, and the connection is closed."""
    async with gateway(LoopbackWorker(saying(b"hello"))) as running:
        huge = b"GET /health HTTP/1.1\r\nx-filler: ".ljust(heads.MAX_HEAD_BYTES + 1, b"a")
        response = await running.raw(huge)
        assert response.startswith(b"HTTP/1.1 400")
        assert b"head of the request is too large" in response
        await running.proves_alive()
