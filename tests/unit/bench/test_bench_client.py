"""bench/client.py: what counts as a right answer, however the bytes arrive."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import pytest
import uvloop
from bench.client import LEFT, Answer, EventReader, Request, Target, encode, send
from hypothesis import given
from hypothesis import strategies as st

Playback: TypeAlias = Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]]

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def token(text: str) -> bytes:
    """The event of one chat token."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text.encode()


def stream(*events: bytes, status: str = "200 OK") -> bytes:
    """A whole chunked HTTP answer, one chunk an event."""
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    return head + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"


GOOD = stream(ROLE, token("a"), token("b"), token("c"), USAGE, DONE)


async def ask(target: Target, expected: int | None = 3, limit_s: float = 20.0) -> Answer:
    """One request, due now."""
    started_s = asyncio.get_running_loop().time()
    return await send(target, Request(0.0, "/v1/chat/completions", b"{}", expected), started_s, limit_s)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_reads_the_same_answer_however_it_is_cut(playback: Playback, size: int) -> None:
    """Token counts, usage and the end are read from pieces of any size."""
    async with playback([GOOD[i : i + size] for i in range(0, len(GOOD), size)]) as target:
        answer = await ask(target)
    assert answer.fault is None
    assert (answer.status, answer.num_tokens, answer.num_prompt_tokens, answer.num_cached) == (200, 3, 7, 4)
    assert answer.num_events == 4


def test_the_client_runs_on_uvloop_too(playback: Playback) -> None:
    """The benches run on uvloop, whose transports are not asyncio's."""

    async def once() -> Answer:
        async with playback([GOOD]) as target:
            return await ask(target)

    assert uvloop.run(once()).fault is None


async def test_events_are_kept_where_that_is_asked(playback: Playback) -> None:
    """All of them in order, or none."""
    async with playback([GOOD]) as target:
        started_s = asyncio.get_running_loop().time()
        kept = await send(target, Request(0.0, "/", b"{}", 3, keeps_events=True), started_s, 20.0)
        other = await send(target, Request(0.0, "/", b"{}", 3), started_s, 20.0)
    whole = [ROLE, token("a"), token("b"), token("c"), USAGE]
    assert kept.events == [event[len(b"data: ") :].strip() for event in whole]
    assert other.events == []
    assert kept.num_cached == other.num_cached == 4


async def test_first_token_is_the_first_text(playback: Playback) -> None:
    """An opening event without text is not the first token."""
    async with playback([stream(ROLE, USAGE, DONE)]) as target:
        answer = await ask(target)
    assert answer.fault == "no token came"
    assert math.isnan(answer.ttft_s)


async def test_text_completions_count_too(playback: Playback) -> None:
    """The text of /v1/completions is a token as well as a chat delta's content."""
    event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    async with playback([stream(event, USAGE, DONE)]) as target:
        answer = await ask(target)
    assert answer.fault is None
    assert answer.first_s is not None


@pytest.mark.parametrize(
    ("bytes_sent", "fault"),
    [
        (stream(token("a"), USAGE), "without [DONE]"),
        (stream(token("a"), DONE), "0 tokens came, not 3"),
        (stream(token("a"), b'data: {"error":{"message":"no"}}\n\n', DONE), "error event"),
        (GOOD[:-20], "connection lost"),
        (stream(b'{"error":"busy"}', status="429 Too Many Requests"), 'status 429: {"error":"busy"}'),
        (b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\ngone", "status 503: gone"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", "status 503"),
        (b"SSH-2.0-x\r\n", "not HTTP"),
        (stream(b"data: {broken\n\n", DONE), "JSON is malformed"),
    ],
)
async def test_says_what_was_wrong(playback: Playback, bytes_sent: bytes, fault: str) -> None:
    """Every wrong answer has a fault in words."""
    async with playback([bytes_sent]) as target:
        answer = await ask(target)
    assert answer.fault is not None
    assert fault in answer.fault


async def test_a_silent_server_is_a_fault_at_the_limit(playback: Playback) -> None:
    """An answer that never ends is given up at its limit."""
    async with playback([GOOD[:100], b""]) as target:
        answer = await ask(target, limit_s=0.05)
    assert answer.fault == "no end within 0.05 s"


async def test_nobody_listening_is_a_fault() -> None:
    """A refused connection is an answer with a fault, not an exception."""
    answer = await ask(Target("http://127.0.0.1:1"))
    assert answer.fault is not None
    assert "Error" in answer.fault


async def test_ttft_counts_from_the_due_time(playback: Playback) -> None:
    """A request that is sent late carries its lateness: no coordinated omission."""
    async with playback([GOOD]) as target:
        started_s = asyncio.get_running_loop().time() - 5.0
        answer = await send(target, Request(1.0, "/", b"{}", 3), started_s, 20.0)
    assert answer.ttft_s >= 4.0


def test_encoded_request_carries_the_targets_headers() -> None:
    """Host, length and the target's own headers are on the wire."""
    target = Target("http://127.0.0.1:99", (("authorization", "Bearer k"),))
    head, _, body = encode(target, Request(0.0, "/p", b"{}")).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /p HTTP/1.1"
    assert b"host: 127.0.0.1:99" in head
    assert b"authorization: Bearer k" in head
    assert (b"content-length: 2" in head, body) == (True, b"{}")


@given(
    events=st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"])), max_size=8),
    cuts=st.lists(st.integers(0, 200)),
)
def test_event_reader_is_blind_to_cuts(events: list[str], cuts: list[int]) -> None:
    """Events come out whole and in order wherever the bytes are cut, comments left out."""
    text = "".join(f": note\ndata: {event}\n\n" for event in events).encode()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader = EventReader()
    out = [data for a, b in itertools.pairwise(edges) for data in reader.push(text[a:b])]
    assert out == [event.strip().encode() for event in events]


def test_tpot_is_the_mean_gap() -> None:
    """Three gaps in 0.3 s are 0.1 s each; one token has none."""
    assert Answer(0.0, first_s=1.0, last_s=1.3, num_tokens=4).tpot_s == pytest.approx(0.1)
    assert math.isnan(Answer(0.0, first_s=1.0, last_s=1.0, num_tokens=1).tpot_s)


async def test_a_whole_answer_is_one_event(playback: Playback) -> None:
    """With its usage, its text and the headers of its response."""
    body = b'{"choices":[{"message":{"content":"abc"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nX-Request-Id: req_1\r\n"
    head += b"content-length: %d\r\n\r\n"
    async with playback([head % len(body), body[:20], body[20:]]) as target:
        answer = await ask(target)
    assert (answer.fault, answer.num_tokens, answer.num_prompt_tokens) == (None, 3, 7)
    assert answer.headers[b"x-request-id"] == b"req_1"
    assert answer.first_s is not None


async def test_a_client_that_hangs_up_has_read_so_many_events(playback: Playback) -> None:
    """What it had read stays, its fault says that it was itself."""
    request = Request(0.0, "/", b"{}", 3, keeps_events=True, leaves_after=2)
    async with playback([stream(ROLE, token("a"), token("b"))[:-5], stream(token("c"))]) as target:
        answer = await send(target, request, asyncio.get_running_loop().time(), 20.0)
    assert (answer.fault, answer.status, answer.num_events) == (LEFT, 200, 2)
    assert [b"content" in event for event in answer.events] == [True] * 3
