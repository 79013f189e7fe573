"""A whole gateway on loopback, in front of loopback workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from antiphon.core.catalogue import ModelEntry
from antiphon.gateway.main import GatewaySettings, serve
from antiphon.store.database import file_url
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker

MODEL = ModelEntry(name="scripted", engine="scripted", context=4096, aliases=("org/alias",))
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Gateway:
    """A gateway that serves in this process."""

    port: int
    lines: Lines
    client: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: object) -> httpx2.Response:
        """Send JSON."""
        return await self.client.post(path, json=body)

    async def chat(self, **fields: object) -> httpx2.Response:
        """One chat request; `fields` are added to the smallest body that works."""
        return await self.post("/v1/chat/completions", {"model": "scripted", "messages": HELLO} | fields)

    async def complete(self, prompt: object = "hello", **fields: object) -> httpx2.Response:
        """One completion request."""
        return await self.post("/v1/completions", {"model": "scripted", "prompt": prompt} | fields)

    async def raw(self, request: bytes) -> bytes:
        """Send these bytes on a socket of their own and read until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def proves_alive(self) -> None:
        """One normal request, answered as ever."""
        response = await self.chat()
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"]


@contextlib.asynccontextmanager
async def gateway(*workers: LoopbackWorker, **settings: Any) -> AsyncIterator[Gateway]:
    """Run workers and a gateway until the block ends; links are up when it begins."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.running())
        urls = tuple(worker.url for worker in workers)
        yield await stack.enter_async_context(gateway_to(*urls, **settings))


@contextlib.asynccontextmanager
async def gateway_to(*urls: str, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway to workers that run already."""
    with tempfile.TemporaryDirectory() as folder:
        async with _serving(settings_in(folder, workers=urls, **settings)) as running:
            yield running


def settings_in(folder: str | Path, **values: Any) -> GatewaySettings:
    """The settings of a gateway on loopback that keeps its database in this folder."""
    usual = {
        "models": (MODEL,),
        "secret": SECRET,
        "port": 0,
        "drain_s": 0.0,
        "database": file_url(Path(folder) / "keys.db"),
        "scope_secret": bytes(32),
    }
    return GatewaySettings(**(usual | values))


@contextlib.asynccontextmanager
async def _serving(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    lines = Lines()
    task = asyncio.create_task(serve(settings, ready.set_result, lines.logger()))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        if task.done():
            await task
        await lines.until("link.up", len(settings.workers))
        url = f"http://127.0.0.1:{await ready}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
            yield Gateway(await ready, lines, client)
    finally:
        task.cancel()
        await asyncio.wait([task])


def events_of(stream: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, without its end mark; comments are left out."""
    events = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def text_of(events: list[dict[str, Any]], choice: int = 0) -> str:
    """The joined text of one choice of a chat stream."""
    parts = [c for event in events for c in event["choices"] if c["index"] == choice]
    return "".join(part["delta"].get("content", "") for part in parts)
