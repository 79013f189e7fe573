"""The error matrix over real sockets: each bad request is a 4xx in OpenAI's envelope, the server lives."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from support.gateways import HELLO, gateway, gateway_to
from support.loopback import LoopbackWorker, saying, worker_info

JSON = {"content-type": "application/json"}
SMALLEST = {"model": "scripted", "messages": HELLO}


def check_envelope(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The whole shape; returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


ROUTES = [
    ("GET", "/", 404, "unknown_url"),
    ("GET", "/v1", 404, "unknown_url"),
    ("GET", "/v1/nothing", 404, "unknown_url"),
    ("POST", "/v1/embeddings", 404, "unknown_url"),
    ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ("PUT", "/v1/completions", 405, "method_not_allowed"),
    ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
    ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ("POST", "/health", 405, "method_not_allowed"),
    ("GET", "/v1/models/none", 404, "model_not_found"),
    ("GET", "/v1/models/../../etc/passwd", 404, None),
    ("GET", "/v1/models/%00", 404, "model_not_found"),
    ("GET", "/v1/%2e%2e/metrics", 404, "unknown_url"),
    ("GET", "//metrics", 404, "unknown_url"),
    ("GET", "/v1/../metrics;x", 404, "unknown_url"),
    ("GET", "/v1/v1/v1/models", 404, "unknown_url"),
]


async def test_routes_that_do_not_exist() -> None:
    """404 and 405 in the envelope, the latter with Allow."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        for method, path, status, code in ROUTES:
            error = check_envelope(await running.client.request(method, path), status)
            assert code is None or error["code"] == code, path
            await running.proves_alive()
        response = await running.client.get("/v1/chat/completions")
        assert response.headers["allow"] == "POST"


async def test_spellings_that_are_tolerated() -> None:
    """A trailing slash, a doubled /v1, HEAD."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        for path in ("/v1/chat/completions/", "/v1/v1/chat/completions", "/v1/v1/chat/completions/"):
            assert (await running.post(path, SMALLEST)).status_code == 200
        for path in ("/v1/models", "/health/", "/v1/models/scripted"):
            head = await running.client.head(path)
            assert (head.status_code, head.content) == (200, b"")


ROBOT = {"role": "robot", "content": "x"}

FIELDS: list[tuple[str, dict[str, object], str]] = [
    ("/v1/chat/completions", {"messages": HELLO}, "model"),
    ("/v1/chat/completions", {"model": "scripted"}, "messages"),
    ("/v1/chat/completions", SMALLEST | {"messages": []}, "messages"),
    ("/v1/chat/completions", SMALLEST | {"messages": "hi"}, "messages"),
    (
        "/v1/chat/completions",
        SMALLEST | {"messages": [ROBOT]},
        "messages.[0].role",
    ),
    ("/v1/chat/completions", SMALLEST | {"messages": [{"role": "user"}]}, "messages.[0].content"),
    (
        "/v1/chat/completions",
        SMALLEST | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.[0].content.[0]",
    ),
    ("/v1/chat/completions", SMALLEST | {"n": 10**9}, "n"),
    ("/v1/chat/completions", SMALLEST | {"max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", SMALLEST | {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("/v1/chat/completions", SMALLEST | {"temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", SMALLEST | {"logit_bias": {"999999": 1}}, "logit_bias"),
    ("/v1/chat/completions", SMALLEST | {"tools": [{}]}, "tools"),
    ("/v1/chat/completions", SMALLEST | {"response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", SMALLEST | {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", SMALLEST | {"stream_options": {}}, "stream_options"),
    ("/v1/completions", {"model": "scripted"}, "prompt"),
    ("/v1/completions", {"model": "scripted", "prompt": []}, "prompt"),
    ("/v1/completions", {"model": "scripted", "prompt": ""}, "prompt"),
    ("/v1/completions", {"model": "scripted", "prompt": [-1]}, "prompt"),
    ("/v1/completions", {"model": "scripted", "prompt": [10**6]}, "prompt"),
    ("/v1/completions", {"model": "scripted", "prompt": "x", "best_of": 10**9}, "best_of"),
    ("/v1/completions", {"model": "scripted", "prompt": "x", "suffix": "y"}, "suffix"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields(stream: bool) -> None:
    """400 with the field's name before a byte of the stream, and the next request is answered as ever."""
    worker = LoopbackWorker(saying("hello"))
    async with gateway(worker) as running:
        for path, body, param in FIELDS:
            extra = {} if "stream_options" in body else {"stream": stream}
            error = check_envelope(await running.post(path, body | extra), 400)
            assert error["param"] == param, (path, body)
            assert error["type"] == "invalid_request_error"
            await running.proves_alive()
        assert worker.submits.qsize() == len(FIELDS)  # the normal ones only


BODIES: list[tuple[bytes, dict[str, str], int]] = [
    (b"", JSON, 400),
    (b"hello", JSON, 400),
    (b"[1]", JSON, 400),
    (b'"s"', JSON, 400),
    (b"null", JSON, 400),
    (b"\xef\xbb\xbf" + json.dumps(SMALLEST).encode(), JSON, 400),
    (b'{"model":"\xff\xfe","messages":[]}', JSON, 400),
    (b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}', JSON, 400),
    (b'{"model":"scripted","messages":[{"role":"\\udfff","content":"x"}]}', JSON, 400),
    (json.dumps(SMALLEST).encode()[:-1] + b',"temperature":NaN}', JSON, 400),
    (json.dumps(SMALLEST).encode()[:-1] + b',"temperature":1e400}', JSON, 400),
    (json.dumps(SMALLEST).encode()[:-1] + b',"top_p":-Infinity}', JSON, 400),
    (json.dumps(SMALLEST).encode()[:-1] + b',"n":' + b"9" * 5000 + b"}", JSON, 400),
    (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, 400),
    (b'{"messages":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", JSON, 400),
    (json.dumps(SMALLEST).encode(), {"content-type": "text/plain"}, 415),
    (json.dumps(SMALLEST).encode(), {}, 415),
    (json.dumps(SMALLEST).encode(), JSON | {"content-encoding": "gzip"}, 415),
    (b"x" * (50 * 2**20), JSON, 413),
]


async def test_bad_bodies() -> None:
    """Malformed, hostile, huge or of the wrong type: 4xx, never 500, and the server answers afterwards."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        for body, headers, status in BODIES:
            for path in ("/v1/chat/completions", "/v1/completions"):
                response = await running.client.post(path, content=body, headers=headers)
                check_envelope(response, status)
            await running.proves_alive()


async def test_a_huge_body_without_a_length_is_refused_on_the_way() -> None:
    """A chunked upload is cut at the bound; the connection ends, the server does not."""

    async def endless() -> Any:
        while True:
            yield b"x" * 65536

    async with gateway(LoopbackWorker(saying("hello"))) as running:
        try:
            response = await running.client.post("/v1/chat/completions", content=endless(), headers=JSON)
        except httpx2.TransportError:
            pass  # the server hung up while the client was still sending
        else:
            check_envelope(response, 413)
        (line,) = await running.lines.until("request.finished")
        assert line["status"] == 413
        await running.proves_alive()


async def test_context_overflow() -> None:
    """400 with the words that clients look for; the smallest context of the workers counts."""
    narrow = LoopbackWorker(saying("hello"), worker_info(context_tokens=100))
    async with gateway(narrow) as running:
        for stream in (False, True):
            message = {"role": "user", "content": "x" * 90}
            error = check_envelope(await running.chat(messages=[message], stream=stream), 400)
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == "messages"
            assert "maximum context length is 100 tokens" in error["message"]
        error = check_envelope(await running.complete("x" * 100), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert (await running.complete("x" * 99)).json()["usage"]["completion_tokens"] == 1


async def test_many_messages() -> None:
    """More than fit are an overflow, not a hang."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        messages = [{"role": "user", "content": "x"}] * 4097
        error = check_envelope(await running.chat(messages=messages), 400)
        assert error["code"] == "context_length_exceeded"
        await running.proves_alive()


async def test_nobody_serves() -> None:
    """503 with Retry-After, before any stream; health stays up; wrong requests are still told so."""
    async with gateway_to() as running:
        for stream in (False, True):
            response = await running.chat(stream=stream)
            assert check_envelope(response, 503)["code"] == "no_replica"
            assert int(response.headers["retry-after"]) >= 1
        check_envelope(await running.chat(n=0), 400)
        assert (await running.client.get("/health")).status_code == 200


async def test_request_ids_are_ours() -> None:
    """A forged id is only a label in the log; each response has its own."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        headers = {"x-request-id": "forged"}
        ids = set()
        for _ in range(2):
            response = await running.client.post("/v1/chat/completions", json=SMALLEST, headers=headers)
            assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]
            ids.add(response.headers["x-request-id"])
            assert response.headers["openai-version"] == "2020-10-01"
            assert int(response.headers["openai-processing-ms"]) >= 0
        assert len(ids) == 2
        assert "forged" not in ids
        assert {line["client_request_id"] for line in running.lines.named("request.finished")} == {"forged"}


async def test_logs_hold_no_text() -> None:
    """Neither prompt nor answer, also when the request fails."""
    async with gateway(LoopbackWorker(saying("canary-answer"))) as running:
        messages = [{"role": "user", "content": "canary-prompt"}]
        await running.chat(messages=messages)
        await running.chat(messages=messages, stream=True)
        await running.chat(messages=messages, n=0)
        await running.chat(messages=[{"role": "canary-role", "content": "x"}])
        await running.complete("canary-prompt", echo=True)
        await running.lines.until("request.finished", 5)
        assert "canary" not in str(running.lines.all)
        assert "canary" not in (await running.client.get("/metrics")).text


async def test_metrics_stay_small() -> None:
    """Random models, routes and methods do not become labels."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        await running.proves_alive()

        async def poke(number: int) -> None:
            await running.chat(model=f"m{number}")
            await running.client.get(f"/v1/r{number}")

        await poke(0)
        before = len((await running.client.get("/metrics")).text.splitlines())
        for number in range(1, 200):
            await poke(number)
        after = len((await running.client.get("/metrics")).text.splitlines())
        assert after <= before + 4  # the /metrics route itself
