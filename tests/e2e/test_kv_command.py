"""`antiphon kv` beside a running `antiphon serve`: what was asked is found, checked and cleared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.served import PATIENCE_S, Served, serving

from antiphon.cli import leash
from support.redisserver import find_redis

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")

SERVED = ("--model", "scripted", "--port", "0", "--redis", "auto")
SYSTEM = "You know all about caches, and you say so at any length. " * 4
CHAT = {
    "model": "scripted",
    "max_tokens": 8,
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tell me. " * 20}],
}


@pytest.fixture(autouse=True)
def needs_redis() -> None:
    """Each of these needs a server to start."""
    find_redis()


def run_kv(served: Served, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """The command; no option says where anything is."""
    environ = {**os.environ, "XDG_STATE_HOME": served.process_environ("XDG_STATE_HOME")}
    environ.pop("ANTIPHON_REDIS_URL", None)
    return subprocess.run(
        [sys.executable, "-m", "antiphon.cli.main", "kv", *arguments, "--json"],
        input=said,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environ,
    )


def kv(served: Served, *arguments: str, said: str = "") -> Any:
    """What the command prints."""
    done = run_kv(served, *arguments, said=said)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chat(served: Served, key: str = "none", **fields: object) -> int:
    """Prompt tokens of this chat that were not computed."""
    reply = httpx2.post(
        f"{served.url}/v1/chat/completions",
        json=CHAT | fields,
        headers={"Authorization": f"Bearer {key}"},
        trust_env=False,
        timeout=PATIENCE_S,
    )
    assert reply.status_code == 200, reply.text
    cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def places(served: Served, **fields: object) -> list[set[str]]:
    """Where each block of this chat's prompt is."""
    report = kv(served, "probe", "--chat", "-", said=json.dumps(CHAT | fields))
    return [set(block["places"]) for block in report["blocks"]]


def wait_until_stored(served: Served) -> None:
    """Writing happens behind the answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not all("redis" in found for found in places(served)):
        assert time.monotonic() < deadline, places(served)


def test_blocks_of_a_chat_are_found_checked_and_cleared() -> None:
    """Nowhere before it was asked, then in engine, host tier and store; a restart leaves the store's."""
    with serving(*SERVED) as served:
        before = places(served)
        assert len(before) > 20
        assert not any(before)
        assert chat(served) == 0
        wait_until_stored(served)
        assert all(found == {"engine@worker-1", "host@worker-1", "redis"} for found in places(served))
        assert not any(places(served, cache_salt="another"))
        (group,) = kv(served, "stats")["store"]
        assert group["tenant"] == "local"
        assert group["num_blocks"] >= len(before)
        assert kv(served, "verify") == {"num_sound": group["num_blocks"], "num_gone": 0, "bad": {}}
        assert kv(served, "clear", "--tenant", "local", "--yes") == {"num_deleted": group["num_blocks"]}
        assert all(found == {"engine@worker-1", "host@worker-1"} for found in places(served))
        assert kv(served, "stats")["store"] == []
        assert served.stop() == 0


def test_worker_that_died_left_its_blocks_in_the_store() -> None:
    """The next one has none in memory, takes them from Redis, and says so."""
    with serving(*SERVED) as served:
        chat(served)
        wait_until_stored(served)
        worker = served.child("worker")
        worker.kill()
        worker.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while run_kv(served, "probe", "--text", "Are you there?").returncode != 0:
            assert time.monotonic() < deadline, "no new worker"
        assert all(found == {"redis"} for found in places(served))
        assert chat(served) > 0
        (worker_stats,) = kv(served, "stats")["workers"]
        assert worker_stats["stats"]["num_store"] > 0
        assert served.stop() == 0


def test_tenants_and_public_prefixes_are_told_apart(tmp_path: Path) -> None:
    """Blocks of the public system prompt are everybody's; what follows is found under its tenant only."""
    public = tmp_path / "public.toml"
    public.write_text(f"[[prefix]]\nsystem = {json.dumps(SYSTEM)}\n")
    with serving(*SERVED, "--public-prefix-file", str(public)) as served:
        environ = {**os.environ, "XDG_STATE_HOME": served.process_environ("XDG_STATE_HOME")}
        created = subprocess.run(
            [sys.executable, "-m", "antiphon.cli.main", "keys", "create", "--tenant", "acme"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environ,
            check=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:  # a running gateway learns of a new key within seconds
            chat(served, created.stdout.strip())
            names = {group["tenant"] for group in kv(served, "stats")["store"]}
            if {"acme", "(public)"} <= names:
                break
            assert time.monotonic() < deadline, names
        report = kv(served, "probe", "--tenant", "acme", "--chat", "-", said=json.dumps(CHAT))
        num_public = report["num_public_tokens"] // 16
        assert 0 < num_public < len(report["blocks"])
        kv(served, "clear", "--tenant", "local", "--yes")
        kv(served, "clear", "--tenant", "acme", "--yes")
        after = kv(served, "probe", "--tenant", "acme", "--chat", "-", said=json.dumps(CHAT))["blocks"]
        assert ["redis" in block["places"] for block in after] == [
            index < num_public for index in range(len(after))
        ]
        assert served.stop() == 0
