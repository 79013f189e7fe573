"""Pages of other origins over real sockets: what a browser would be told, on every kind of answer."""

from __future__ import annotations

import json

import httpx2
import pytest

from antiphon.core.generation import Generation, StepOutput, Terminal
from support.gateways import HELLO, Gateway, gateway
from support.loopback import LoopbackWorker, Session, saying

APP, EVIL = "https://app.example", "https://evil.example"
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


async def _hangs(session: Session, generation: Generation) -> None:
    """Says one letter, and no more."""
    await session.send(StepOutput(generation.id, 0, 0, [ord("h")]))


async def _chat(running: Gateway, origin: str, **fields: object) -> httpx2.Response:
    body = {"model": "scripted", "messages": HELLO} | fields
    headers = {"origin": origin, "authorization": "Bearer anything"}
    return await running.client.post(CHAT, json=body, headers=headers)


async def _preflight(running: Gateway, path: str, **headers: str) -> httpx2.Response:
    return await running.client.options(path, headers={"origin": APP} | PREFLIGHT | headers)


def _words_of_cors(response: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


async def test_preflight_is_answered_before_anything_else() -> None:
    """It carries no key and needs none; it is on no account; other origins are not let through."""
    worker = LoopbackWorker(saying("hello"))
    async with gateway(worker, host="0.0.0.0", behind_proxy=True, cors_origins=(APP,)) as running:
        for path in (CHAT, "/v1/models", "/v1/client_tokens", "/nothing"):
            response = await _preflight(running, path)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == APP
            assert "POST" in response.headers["access-control-allow-methods"]
            assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in response.headers
            assert "Origin" in response.headers["vary"]
        refused = await _preflight(running, CHAT, origin=EVIL)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        await running.proves_alive()
        assert len(await running.lines.until("request.finished")) == 1


async def test_every_answer_can_be_read() -> None:
    """Success, stream and each error: all name the origin, tell caches so, and expose their headers."""
    async with gateway(LoopbackWorker(saying("hello")), cors_origins=(APP,)) as running:
        answers = [
            await _chat(running, APP),
            await _chat(running, APP, stream=True),
            await _chat(running, APP, model="none"),
            await _chat(running, APP, temperature=9),
            await running.client.get("/nothing", headers={"origin": APP}),
            await running.client.delete("/v1/models", headers={"origin": APP}),
            await running.client.get("/health", headers={"origin": APP}),
            await running.client.get(
                "/v1/models", headers={"origin": APP, "authorization": "Bearer ant-ct-x"}
            ),
        ]
        assert [response.status_code for response in answers] == [200, 200, 404, 400, 404, 405, 200, 401]
        for response in answers:
            assert _words_of_cors(response) == {
                "access-control-allow-origin": APP,
                "access-control-expose-headers": "*",
            }
            assert response.headers["vary"] == "Origin"
            assert response.headers["x-request-id"]


async def test_error_inside_a_stream_can_be_read() -> None:
    """A stream that breaks off names the origin too: its head was sent with the first word."""
    worker = LoopbackWorker(_hangs)
    async with gateway(worker, cors_origins=(APP,)) as running:
        body = {"model": "scripted", "messages": HELLO, "stream": True}
        async with running.client.stream("POST", CHAT, json=body, headers={"origin": APP}) as response:
            assert response.headers["access-control-allow-origin"] == APP
            text = ""
            async for line in response.aiter_lines():
                text += line
                if '"content":"h"' in line:
                    generation = worker.submits.get_nowait()
                    (session,) = worker.sessions
                    await session.send(StepOutput(generation.id, 0, 1, [], Terminal.ERROR))
        assert (response.status_code, '"code":"engine_fault"' in text) == (200, True)


async def test_streams_are_not_held_back() -> None:
    """The first word comes while the rest is not there yet."""
    async with gateway(LoopbackWorker(_hangs), cors_origins=(APP,)) as running:
        body = {"model": "scripted", "messages": HELLO, "stream": True, "max_tokens": 100}
        headers = {"origin": APP}
        async with running.client.stream("POST", CHAT, json=body, headers=headers) as response:
            assert response.headers["access-control-allow-origin"] == APP
            async for line in response.aiter_lines():
                if '"content":"h"' in line:
                    break
            else:
                pytest.fail("the stream ended")


async def test_without_a_list_nothing_is_said() -> None:
    """A gateway without origins says no word of CORS; a page elsewhere is refused on loopback."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        for response in (await _chat(running, EVIL), await _preflight(running, CHAT)):
            assert response.status_code == 403
            assert _words_of_cors(response) == {}
        own = await _chat(running, running.url)
        assert own.status_code == 200
        plain = await running.client.post(
            CHAT,
            content=json.dumps({"model": "scripted", "messages": HELLO}),
            headers={"content-type": "text/plain"},
        )
        assert plain.status_code == 415  # what a form or a page can send without a preflight


async def test_any_origin_has_no_credentials() -> None:
    """`*` lets all pages read, and never with cookies."""
    async with gateway(LoopbackWorker(saying("hello")), cors_origins=("*",)) as running:
        response = await _chat(running, EVIL)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers
