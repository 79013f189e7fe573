"""`antiphon gateway` with a catalogue of other servers, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2

from support.gateways import HELLO
from support.upstreams import KEY, KEY_ENV, UpstreamServer, fails, says

GATEWAY = (sys.executable, "-m", "antiphon.cli.main", "gateway", "--port", "0", "--supervised")


def catalogue(folder: Path, good: str, bad: str) -> Path:
    """Two servers and a route that prefers the bad one."""
    file = folder / "models.toml"
    file.write_text(
        f"""
[[model]]
name = "bad"
engine = "openai"
public = false
[model.upstream]
url = "{bad}"

[[model]]
name = "good"
engine = "openai"
[model.upstream]
url = "{good}"
api_key_env = "{KEY_ENV}"

[[route]]
name = "chat"
targets = [{{model = "bad"}}]
fallback = ["good"]
"""
    )
    return file


@contextlib.asynccontextmanager
async def started(
    folder: Path, *options: str, **environ: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The command and its first line."""
    secret = folder / "secret"
    secret.write_text("s" * 32)
    process = await asyncio.create_subprocess_exec(
        *GATEWAY,
        *("--secret-file", str(secret), *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environ,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(40):
            yield process, (await process.stdout.readline()).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_gateway_of_upstreams_alone(tmp_path: Path) -> None:
    """No worker, no model of its own: what the catalogue names is served, keys come from the environment."""
    good, bad = UpstreamServer(says("fine")), UpstreamServer(fails(500))
    async with good.running(), bad.running():
        file = catalogue(tmp_path, good.url, bad.url)
        async with started(tmp_path, "--catalogue", str(file), **{KEY_ENV: KEY}) as (_, line):
            url = f"http://127.0.0.1:{json.loads(line)['port']}"
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                listed = (await client.get("/v1/models")).json()["data"]
                body = {"model": "chat", "messages": HELLO}
                response = await client.post("/v1/chat/completions", json=body)
    assert [model["id"] for model in listed] == ["chat", "good"]
    assert response.json()["choices"][0]["message"]["content"] == "fine"
    assert good.asked[0].values("authorization") == [f"Bearer {KEY}"]
    assert bad.asked[0].values("authorization") == []


async def test_a_key_that_is_not_there_is_told_at_start(tmp_path: Path) -> None:
    """Which model wants which variable; the process ends."""
    file = catalogue(tmp_path, "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1")
    async with started(tmp_path, "--catalogue", str(file)) as (process, _):
        assert process.stderr is not None
        words = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    assert f"model 'good': the environment variable {KEY_ENV} does not hold a key" in words


async def test_nobody_computes(tmp_path: Path) -> None:
    """Neither worker nor upstream: refused at start, with the ways out."""
    async with started(tmp_path) as (process, _):
        assert process.stderr is not None
        words = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    assert "--worker" in words and "--catalogue" in words
