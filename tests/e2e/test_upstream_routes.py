"""Routes: shares, stickiness, fallbacks and mirrors, through a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.core.catalogue import MirrorEntry, RouteEntry, TargetEntry
from antiphon.core.generation import Generation
from support.gateways import MODEL, Gateway, events_of, gateway_to, text_of
from support.loopback import LoopbackWorker, Session, saying, worker_info
from support.upstreams import KEY, KEY_ENV, Reply, UpstreamServer, delta, fails, says


def route(*targets: str, **fields: Any) -> RouteEntry:
    """The route `chat`."""
    return RouteEntry(name="chat", targets=tuple(map(TargetEntry, targets)), **fields)


@contextlib.asynccontextmanager
async def routed(
    entry: RouteEntry, *servers: UpstreamServer, worker: LoopbackWorker | None = None, **fields: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose models are `up0`, `up1` … and, where there is a worker, `scripted`."""
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.running())
        models = tuple(server.entry(f"up{number}", **fields) for number, server in enumerate(servers))
        urls: tuple[str, ...] = ()
        if worker is not None:
            await stack.enter_async_context(worker.running())
            models, urls = (*models, MODEL), (worker.url,)
        gateway = gateway_to(*urls, models=models, routes=(entry,), upstream_keys={KEY_ENV: KEY})
        yield await stack.enter_async_context(gateway)


async def test_a_share_goes_to_the_canary_and_a_session_stays() -> None:
    """Both sides get some; who says whose chat it is stays where it is; the header says who answered."""
    canary = RouteEntry(name="chat", targets=(TargetEntry("up0", 3.0), TargetEntry("up1", 1.0)))
    async with routed(canary, UpstreamServer(says("old")), UpstreamServer(says("new"))) as running:
        drawn = {
            (await running.chat(model="chat", user=f"u{number}")).headers["x-antiphon-model"]
            for number in range(30)
        }
        assert drawn == {"up0", "up1"}
        for session in ({"user": "u1"}, {"prompt_cache_key": "k"}, {"safety_identifier": "s"}):
            responses = [await running.chat(model="chat", **session) for _ in range(6)]
            assert len({response.headers["x-antiphon-model"] for response in responses}) == 1
            assert {response.json()["model"] for response in responses} == {"chat"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "first", [fails(500), fails(503), fails(429), fails(401), Reply([delta("")], is_cut=True)]
)
async def test_what_lacks_capacity_falls_back(first: Reply, stream: bool) -> None:
    """Before a word the next model answers; the client sees one good answer, the metrics the other."""
    async with routed(
        route("up0", fallback=("up1",)), UpstreamServer(first), UpstreamServer(says("fine"))
    ) as running:
        response = await running.chat(model="chat", stream=stream)
        assert response.status_code == 200
        assert response.headers["x-antiphon-model"] == "up1"
        assert "fine" in response.text
        if stream:
            assert text_of(events_of(response.text)) == "fine"
            assert response.text.count('"role":"assistant"') == 1
        metrics = (await running.client.get("/metrics")).text
        assert 'antiphon_route_fallbacks_total{model="up0"} 1.0' in metrics
        line = running.lines.named("request.finished")[0]
        assert (line["model"], line["passed_over"], line["tokens_out"]) == ("up1", "up0", 5)


async def test_a_mistake_of_the_client_does_not_fall_back() -> None:
    """A 400 is answered as it is; nobody else is asked."""
    spare = UpstreamServer(says("fine"))
    async with routed(route("up0", fallback=("up1",)), UpstreamServer(fails(400)), spare) as running:
        assert (await running.chat(model="chat")).status_code == 400
    assert not spare.asked


async def test_after_a_word_nobody_else_is_asked() -> None:
    """An error event, never a second beginning."""
    spare = UpstreamServer(says("fine"))
    cut = UpstreamServer(Reply([delta("he")], is_cut=True))
    async with routed(route("up0", fallback=("up1",)), cut, spare) as running:
        events = events_of((await running.chat(model="chat", stream=True)).text)
    assert text_of(events[:-1]) == "he" and "error" in events[-1]
    assert not spare.asked


async def test_after_the_client_left_nobody_else_is_asked() -> None:
    """Its leaving is no want of capacity."""
    spare = UpstreamServer(says("fine"))
    silent = UpstreamServer(Reply([asyncio.Event()]))
    async with routed(route("up0", fallback=("up1",)), silent, spare) as running:
        request = asyncio.create_task(running.chat(model="chat"))
        await silent.arrived.get()
        request.cancel()
        (line,) = await running.lines.until("request.finished")
        assert "passed_over" not in line and not running.lines.named("route.fallback")
    assert not spare.asked


async def test_the_last_error_is_the_clients() -> None:
    """Where all fail: busy stays busy, with the wait that the last one asked for."""
    servers = UpstreamServer(fails(500)), UpstreamServer(fails(429, retry_after=7))
    async with routed(route("up0", fallback=("up1",)), *servers) as running:
        response = await running.chat(model="chat")
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


async def test_workers_and_upstreams_stand_in_for_each_other() -> None:
    """A server that fails is replaced by the fleet, a fleet without the model by a server."""
    worker = LoopbackWorker(saying("local"))
    async with routed(
        route("up0", fallback=("scripted",)), UpstreamServer(fails(500)), worker=worker
    ) as running:
        body = (await running.chat(model="chat")).json()
        assert body["choices"][0]["message"]["content"] == "local"
        assert body["usage"]["completion_tokens"] == 5
        completion = (await running.complete(model="chat", echo=True)).json()
        assert completion["choices"][0]["text"] == "hellolocal"  # only one of them takes plain text

    other = LoopbackWorker(saying("x"), worker_info("other"))
    entry = route("scripted", fallback=("up0",))
    async with routed(entry, UpstreamServer(says("far")), worker=other) as running:
        response = await running.chat(model="chat")
    assert response.json()["choices"][0]["message"]["content"] == "far"


async def test_a_request_that_kills_workers_is_not_handed_on() -> None:
    """Another model's server is not the next to die of it."""

    async def dies(session: Session, generation: Generation) -> None:
        worker.life += 1
        await session.close()

    worker = LoopbackWorker(dies)
    spare = UpstreamServer(says("fine"))
    entry = route("scripted", fallback=("up0",))
    async with routed(entry, spare, worker=worker) as running:
        response = await running.chat(model="chat")
    assert response.json()["error"]["code"] == "request_quarantined"
    assert not spare.asked


async def test_a_hidden_model_is_reached_by_routes_only() -> None:
    """It is neither listed nor found by name; the route and its alias are."""
    entry = RouteEntry(name="chat", targets=(TargetEntry("up0"),), aliases=("gpt",))
    async with routed(entry, UpstreamServer(says("fine")), public=False) as running:
        assert [m["id"] for m in (await running.client.get("/v1/models")).json()["data"]] == ["chat"]
        assert (await running.client.get("/v1/models/gpt")).json()["id"] == "chat"
        assert (await running.client.get("/v1/models/up0")).status_code == 404
        assert (await running.chat(model="up0")).status_code == 404
        assert (await running.chat(model="gpt")).json()["model"] == "gpt"


async def test_a_mirror_gets_copies_and_changes_nothing() -> None:
    """It fails, or is silent: the client has its answer; the copy is counted, not billed."""
    shadow = UpstreamServer(says("never seen"), fails(500), Reply([asyncio.Event()]))
    entry = route("up0", mirror=MirrorEntry("up1"))
    async with routed(entry, UpstreamServer(says("seen")), shadow) as running:
        for _ in range(3):
            body = (await running.chat(model="chat", user="u")).json()
            assert body["choices"][0]["message"]["content"] == "seen"
            assert (await shadow.arrived.get()).body["messages"][0]["content"] == "hello"
        metrics = (await running.client.get("/metrics")).text
        assert 'antiphon_generation_tokens_total{model="up0"} 15.0' in metrics
        assert 'antiphon_generation_tokens_total{model="up1"}' not in metrics
        assert 'antiphon_mirrored_requests_total{model="up1",outcome="ok"} 1.0' in metrics
        assert len(running.lines.named("request.finished")) == 4  # the page of metrics is one
    assert shadow.num_open == 0


async def test_a_mirror_is_drawn_by_its_share() -> None:
    """A share of nothing copies nothing."""
    shadow = UpstreamServer(says("never"))
    entry = route("up0", mirror=MirrorEntry("up1", 0.0))
    async with routed(entry, UpstreamServer(says("seen")), shadow) as running:
        assert (await running.chat(model="chat")).status_code == 200
    assert not shadow.asked
