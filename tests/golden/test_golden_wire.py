"""The wire, byte for byte: transcripts that were read by a person once and must not change unnoticed.

What differs from run to run (ids, times, dates) is replaced by names. `ANTIPHON_GOLDEN=write` writes
the files anew; the difference is then to be reviewed like code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx2
import pytest

from support.gateways import HELLO, gateway
from support.loopback import LoopbackWorker, saying

FOLDER = Path(__file__).parent / "wire"
CHAT = {"model": "scripted", "messages": HELLO}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

CASES: dict[str, tuple[str, str, object]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat-stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    "chat-stream-usage-n2": ("POST", "/v1/chat/completions", CHAT | USAGE | {"n": 2, "service_tier": "auto"}),
    "chat-logprobs": ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat-logprobs-stream": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 1, "stream": True},
    ),
    "chat-stop": ("POST", "/v1/chat/completions", CHAT | {"stop": "é", "stream": True}),
    "completion": ("POST", "/v1/completions", {"model": "scripted", "prompt": "hi", "echo": True}),
    "completion-logprobs-stream": (
        "POST",
        "/v1/completions",
        {"model": "scripted", "prompt": "a", "logprobs": 1} | USAGE,
    ),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/scripted", None),
    "health": ("GET", "/health", None),
    "error-field": ("POST", "/v1/chat/completions", CHAT | {"n": 0}),
    "error-missing": ("POST", "/v1/chat/completions", {"model": "scripted"}),
    "error-model": ("POST", "/v1/chat/completions", CHAT | {"model": "none"}),
    "error-route": ("GET", "/v1/none", None),
    "error-method": ("GET", "/v1/completions", None),
    "error-context": ("POST", "/v1/completions", {"model": "scripted", "prompt": [1] * 4096}),
}

VARYING = [
    (re.compile(r"chatcmpl-[0-9a-f]{32}"), "chatcmpl-ID"),
    (re.compile(r"cmpl-[0-9a-f]{32}"), "cmpl-ID"),
    (re.compile(r"req_[0-9a-f]{32}"), "req_ID"),
    (re.compile(r'"created":\d+'), '"created":TIME'),
    (re.compile(r"(?m)^(date|openai-processing-ms): .*$"), r"\1: VARIES"),
    (re.compile(r"(?m)^(x-antiphon-route: \S+ \S+) .*$"), r"\1 COST"),
]


def transcript(response: httpx2.Response) -> str:
    """Status, headers and body as text, the varying parts named."""
    headers = "".join(f"{name}: {value}\n" for name, value in sorted(response.headers.items()))
    text = f"{response.status_code}\n{headers}\n{response.text}"
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return text


@pytest.mark.parametrize("name", CASES)
async def test_the_wire_is_as_it_was(name: str) -> None:
    """The same request gives the same bytes."""
    method, path, body = CASES[name]
    async with gateway(LoopbackWorker(saying("hé🎉", cached=5))) as running:
        found = transcript(await running.client.request(method, path, json=body))
    _compare(FOLDER / f"{name}.txt", found)


async def test_the_metrics_are_as_they_were() -> None:
    """Dashboards are built on these names and labels."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        await running.proves_alive()
        metrics = (await running.client.get("/metrics")).text
    lines = [line for line in metrics.splitlines() if "_bucket{" not in line and "_created" not in line]
    found = "\n".join(re.sub(r" [0-9.e+-]+$", "", line) for line in lines)
    _compare(FOLDER / "metrics.txt", re.sub(r"127\.0\.0\.1:\d+", "HOST", found) + "\n")


def _compare(path: Path, found: str) -> None:
    if os.environ.get("ANTIPHON_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
