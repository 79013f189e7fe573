"""What arrives byte by byte: framing, headers, odd HTTP, hosts. Raw sockets only."""

from __future__ import annotations

import json

import pytest

from support.gateways import HELLO, Gateway, gateway
from support.loopback import LoopbackWorker, saying

BODY = json.dumps({"model": "scripted", "messages": HELLO}).encode()
STREAM = json.dumps({"model": "scripted", "messages": HELLO, "stream": True}).encode()


def request(
    method: str = "POST",
    path: str = "/v1/chat/completions",
    *,
    host: bytes | None = b"127.0.0.1",
    headers: bytes = b"",
    body: bytes = b"",
    version: str = "1.1",
) -> bytes:
    lines = f"{method} {path} HTTP/{version}\r\n".encode()
    if host is not None:
        lines += b"Host: " + host + b"\r\n"
    if body:
        lines += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return lines + headers + b"Connection: close\r\n\r\n" + body


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def envelope_of(response: bytes) -> dict[str, object]:
    error = json.loads(response.split(b"\r\n\r\n", 1)[1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


async def health_is(running: Gateway, status: int, **how: bytes | None) -> None:
    response = await running.raw(request("GET", "/health", **how))
    assert status_of(response) == status, how


GOOD_HOSTS = [b"127.0.0.1", b"localhost:8000", b"api.example.org", b"[::1]:8000", b"my_host", b"a.example."]
BAD_HOSTS = [
    b"a/?x=",
    b"a/#",
    b"evil/v1/models?",
    b"a b",
    b"a:b",
    b"a:1:2",
    b"[::1",
    b"\xff",
    b"@x",
    b"",
    b"-x",
]
BAD_HOSTS += [b"a" * 300, b"a:999999", b"a,b", b"http://a", b"a\tb"]


async def test_hosts() -> None:
    """A Host that is not a host is refused; one that is makes no difference."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        for host in GOOD_HOSTS:
            await health_is(running, 200, host=host)
        for host in BAD_HOSTS:
            await health_is(running, 400, host=host)
        for host in (b"a/?x=", b"evil/v1/models?"):
            response = await running.raw(request(host=host, body=BODY))
            assert status_of(response) == 400
            assert envelope_of(response)["code"] == "invalid_host"
        await health_is(running, 400, host=None)
        await health_is(running, 400, headers=b"Host: other\r\n")
        await running.proves_alive()


async def test_forwarding_headers_decide_nothing() -> None:
    """They are anybody's to write."""
    headers = b"X-Forwarded-Host: a/?x\r\nX-Forwarded-For: 1.2.3.4\r\nX-Original-URL: /metrics\r\n"
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        response = await running.raw(request("GET", "/v1/nothing", headers=headers))
        assert status_of(response) == 404
        assert envelope_of(response)["code"] == "unknown_url"


async def test_http_1_0() -> None:
    """Answered, with or without a Host."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        await health_is(running, 200, host=None, version="1.0")
        response = await running.raw(request(body=BODY, version="1.0"))
        assert status_of(response) == 200
        assert b'"content":"hello"' in response


async def test_stream_framing() -> None:
    """Headers that keep proxies from holding it back; only `data: ` lines; no ids, no event names, no BOM."""
    async with gateway(LoopbackWorker(saying("hé\u2028🎉"))) as running:
        response = await running.raw(request(body=STREAM))
        head, _, chunked = response.partition(b"\r\n\r\n")
        headers = {line.split(b": ")[0].lower(): line.split(b": ", 1)[1] for line in head.split(b"\r\n")[1:]}
        assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert headers[b"cache-control"] == b"no-cache"
        assert headers[b"x-accel-buffering"] == b"no"
        assert b"content-encoding" not in headers
        body = dechunked(chunked)
        assert body.isascii()
        *events, last, rest = body.split(b"\n\n")
        assert rest == b""
        assert last == b"data: [DONE]"
        assert all(event.startswith(b'data: {"id":') and b"\n" not in event for event in events)


def dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


async def test_a_chunked_upload() -> None:
    """Taken like any other."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:20], BODY[20:]))
        headers = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        response = await running.raw(request(headers=headers) + pieces + b"0\r\n\r\n")
        assert status_of(response) == 200


async def test_two_pipelined_requests() -> None:
    """Both are answered, in order, each with an id of its own."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        first = request(body=BODY).replace(b"Connection: close\r\n", b"")
        response = await running.raw(first + request("GET", "/v1/models"))
        assert response.count(b"HTTP/1.1 200 OK") == 2
        assert response.index(b"chat.completion") < response.index(b'"object":"list"')
        assert response.count(b"x-request-id: req_") == 2


@pytest.mark.parametrize(
    "bad",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Header\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http(bad: bytes) -> None:
    """Refused below the application; the gateway lives."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        response = await running.raw(bad)
        assert status_of(response) == 400
        await running.proves_alive()
