"""Bounds, deadlines and health of upstreams, over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from antiphon.core.generation import Priority
from antiphon.router.admission import QueueBounds
from support.gateways import Gateway, events_of
from support.upstreams import DONE, Reply, UpstreamServer, delta, fails, in_front_of, says

NO_WAIT = dict.fromkeys(Priority, 0.01)


async def test_more_than_it_may_have_at_once_waits_here() -> None:
    """The bound counts requests that are on their way; one more is sent when one of them has ended."""
    gate = asyncio.Event()
    server = UpstreamServer(Reply([gate, *says("hello").parts]))
    async with in_front_of(server, max_in_flight=2) as running:
        first = [asyncio.create_task(running.chat(model="far")) for _ in range(2)]
        for _ in first:
            await server.arrived.get()
        third = asyncio.create_task(running.chat(model="far"))
        while (
            'antiphon_queue_requests{class="interactive",model="far"} 1.0'
            not in (await running.client.get("/metrics")).text
        ):
            pass  # asking has waited
        assert len(server.asked) == 2
        gate.set()
        assert [(await each).status_code for each in (*first, third)] == [200, 200, 200]
    assert len(server.asked) == 3


async def test_more_than_may_wait_is_busy() -> None:
    """429 at once, and nothing is sent."""
    gate = asyncio.Event()
    server = UpstreamServer(Reply([gate, *says("hello").parts]))
    async with in_front_of(server, max_in_flight=1, queue=QueueBounds(longest_wait_s=NO_WAIT)) as running:
        first = asyncio.create_task(running.chat(model="far"))
        await server.arrived.get()
        second = await running.chat(model="far")
        assert (second.status_code, len(server.asked)) == (429, 1)
        assert second.headers["x-antiphon-dropped-reason"] == "rejected-wait-too-long"
        gate.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_an_upstream_that_is_silent_too_long(stream: bool) -> None:
    """Before its first token: an error status. Comments are no tokens. The connection is closed."""
    pinging = Reply([b": ping\n\n", delta(""), asyncio.Event()])
    server = UpstreamServer(pinging)
    async with in_front_of(server, first_token_timeout_s=0.2) as running:
        response = await running.chat(model="far", stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_fault")
        async with asyncio.timeout(10):
            await server.left.get()


async def test_an_upstream_that_falls_silent_in_mid_answer() -> None:
    """An error event after its own, shorter, deadline."""
    server = UpstreamServer(Reply([delta("he"), asyncio.Event()]))
    async with in_front_of(server, silence_timeout_s=0.2) as running:
        events = events_of((await running.chat(model="far", stream=True)).text)
        assert events[-1]["error"]["code"] == "upstream_fault"
        async with asyncio.timeout(10):
            await server.left.get()


async def test_the_requests_own_time_runs_out() -> None:
    """504, whatever the upstream would still be allowed."""
    server = UpstreamServer(Reply([asyncio.Event()]))
    async with in_front_of(server, request_timeout_s=0.3) as running:
        response = await running.chat(model="far")
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        async with asyncio.timeout(10):
            await server.left.get()


async def test_connections_are_used_again() -> None:
    """One after the other on one connection."""
    server = UpstreamServer(says("hello"))
    async with in_front_of(server) as running:
        for _ in range(3):
            assert (await running.chat(model="far")).status_code == 200
    assert [asked.connection for asked in server.asked] == [1, 1, 1]


async def test_a_pooled_connection_that_was_closed_costs_nothing() -> None:
    """Closed as the second request came: it is sent once more on another, and the client sees nothing."""
    server = UpstreamServer(says("hello"))
    async with in_front_of(server) as running:
        assert (await running.chat(model="far")).status_code == 200
        server.drops_next_reused = True
        assert (await running.chat(model="far")).status_code == 200
        assert len(running.lines.named("upstream.resent")) == 1
    assert server.num_connections == 2 and len(server.asked) == 2


async def test_a_fresh_connection_that_is_closed_is_not_tried_again() -> None:
    """The server may have begun: one request, one error."""
    server = UpstreamServer(Reply([], is_cut=True))
    server.drops_all = True
    async with in_front_of(server) as running:
        assert (await running.chat(model="far")).status_code == 503
    assert server.num_connections == 1


async def test_failures_put_it_aside_and_a_probe_brings_it_back() -> None:
    """Five in a row; then it is not asked until its time has come, and one good answer suffices."""
    server = UpstreamServer(*[fails(500)] * 5, says("well again"))
    async with in_front_of(server) as running:
        for _ in range(5):
            assert (await running.chat(model="far")).status_code == 502
        aside = await running.chat(model="far")
        assert (aside.status_code, aside.json()["error"]["code"]) == (503, "no_replica")
        assert int(aside.headers["retry-after"]) >= 1
        assert len(server.asked) == 5
        assert 'antiphon_upstream_up{upstream="far"} 0.0' in (await running.client.get("/metrics")).text
        await _until_answered(running)
        assert running.lines.named("upstream.aside") and running.lines.named("upstream.back")


async def test_bad_requests_and_busy_answers_do_not_put_it_aside() -> None:
    """A burst of clients' mistakes, and a server that is full, are no failures of the server."""
    server = UpstreamServer(*[fails(400)] * 8, *[fails(429)] * 8, says("hello"))
    async with in_front_of(server) as running:
        statuses = [(await running.chat(model="far")).status_code for _ in range(17)]
    assert statuses == [400] * 8 + [429] * 8 + [200]


async def test_nobody_listens_there() -> None:
    """503 with Retry-After."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        async with in_front_of(UpstreamServer(), url=url) as running:
            response = await running.chat(model="far", stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
    assert "127.0.0.1" not in response.text


async def test_a_gateway_that_stops_ends_its_upstreams() -> None:
    """An open stream gets its error event, and the upstream's connection closes."""
    server = UpstreamServer(Reply([delta("he"), asyncio.Event(), DONE]))
    async with server.running():
        async with in_front_of(server) as running:
            request = asyncio.create_task(running.chat(model="far", stream=True))
            await server.arrived.get()
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await server.left.get()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def _until_answered(running: Gateway) -> None:
    for _ in range(100):
        if (await running.chat(model="far")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come back")
