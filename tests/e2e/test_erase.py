"""A tenant is erased while everything runs: its keys, its usage, its KV in Redis and in workers' memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from antiphon.cli import leash
from antiphon.worker.kvinfo import KvHeld
from support.kvserve import cached, card_of, chat, num_stored, until
from support.postgres import PostgresServer
from support.redisserver import redis_server
from support.served import Served, serving, state_of_its_own

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")

SAID = [{"role": "user", "content": "What I say is long enough for several blocks of sixteen tokens each."}]


def _antiphon(environ: dict[str, str], *arguments: str) -> Any:
    command = [sys.executable, "-m", "antiphon.cli.main", *arguments, "--json"]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _held(served: Served) -> tuple[set[str], set[str]]:
    """Hashes that the one worker holds, in its engine and in its host tier."""
    card = card_of(served)
    secret = Path(card.secret_file).read_text()
    reply = httpx2.get(
        f"{card.workers[0]}/kv/held", headers={"authorization": f"Bearer {secret}"}, trust_env=False
    )
    held = msgspec.json.decode(reply.content, type=KvHeld)
    return set(held.engine), set(held.host)


def test_an_erased_tenant_leaves_nothing(postgres: PostgresServer) -> None:
    """PostgreSQL, Redis, gateway and worker are running; another tenant keeps all that is its."""
    url = postgres.url(postgres.new_database())
    with redis_server() as redis, state_of_its_own() as environ:
        environ |= {"ANTIPHON_DATABASE_URL": url, "ANTIPHON_REDIS_URL": redis.url}
        ada, bob = (_antiphon(environ, "keys", "create", "--tenant", name)["key"] for name in ("ada", "bob"))
        with serving("--model", "scripted", "--port", "0", **environ) as served:
            ask = {"model": "scripted"}
            chat(served, SAID, bob, **ask)
            until(lambda: num_stored(served) > 0, "nothing is written")
            chat(served, SAID, bob, **ask)
            theirs, num_theirs = _held(served), num_stored(served)
            chat(served, SAID, ada, **ask)
            until(lambda: num_stored(served) >= 2 * num_theirs, "the second tenant's is not written")
            until(lambda: _is_more(_held(served), theirs), "the second tenant's is not held")
            erased = _antiphon(environ, "tenants", "erase", "ada", "--yes")
            assert erased["removed"] == {"usage": 1, "api_keys": 1}
            assert erased["num_blocks"] == num_theirs
            assert _held(served) == theirs
            assert _status(served, ada) == 401
            assert cached(chat(served, SAID, bob, **ask)) > 0
            lines = _antiphon(environ, "tenants", "list")
            assert [line["name"] for line in lines] == ["bob", "local"]
            for process in served.children():
                assert not any("p%40ss" in part for part in process.cmdline())


def _is_more(held: tuple[set[str], set[str]], before: tuple[set[str], set[str]]) -> bool:
    return all(now > then for now, then in zip(held, before, strict=True))


def _status(served: Served, key: str) -> int:
    return httpx2.post(
        f"{served.url}/v1/chat/completions",
        json={"model": "scripted", "messages": SAID},
        headers={"authorization": f"Bearer {key}"},
        trust_env=False,
    ).status_code
