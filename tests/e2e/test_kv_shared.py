"""What the KV store is for, end to end: conversations outlive workers, tenants stay apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest

from antiphon.cli import leash
from antiphon.cli.runfolder import RunCard, living_runs
from antiphon.worker.kvinfo import KvInfo
from support.redisserver import find_redis
from support.served import PATIENCE_S, Served, serving, state_of_its_own

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")

LONG = " ".join(f"Rule {number}: answer shortly and be kind to number {number}." for number in range(60))


@pytest.fixture(autouse=True)
def needs_redis() -> None:
    """Each of these needs a server to start."""
    find_redis()


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def card_of(served: Served) -> RunCard:
    """What the run tells other commands about itself."""
    (card,) = living_runs(Path(served.process_environ("XDG_STATE_HOME")) / "antiphon")
    return card


def infos_of(served: Served) -> list[KvInfo]:
    """Each worker's `/kv` page, of those that answer."""
    card = card_of(served)
    secret = Path(card.secret_file).read_text()
    pages: list[KvInfo] = []
    for worker in card.workers:
        try:
            reply = httpx2.get(f"{worker}/kv", headers={"authorization": f"Bearer {secret}"}, trust_env=False)
        except httpx2.HTTPError:
            continue
        pages.append(msgspec.json.decode(reply.content, type=KvInfo))
    return pages


def chat(served: Served, messages: list[dict[str, str]], key: str = "any", **fields: object) -> Any:
    """One chat, decoded."""
    body = {"model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0} | fields
    reply = httpx2.post(
        f"{served.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(answer: Any) -> int:
    """Prompt tokens that were not computed, as the client is told."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.model
def test_a_chat_goes_on_at_another_worker_after_kill_9() -> None:
    """The second turn finds nearly all of the first one's KV in Redis, and says what it would have said."""
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "Who are you?"}]
    with serving("--workers", "2", "--redis", "auto", "--port", "0", ANTIPHON_REDIS_URL="") as served:
        first = chat(served, messages)
        assert cached(first) == 0
        num_history = first["usage"]["total_tokens"]
        messages += [first["choices"][0]["message"], {"role": "user", "content": "Say it again."}]
        with_kv = [i for i in infos_of(served) if i.stats.num_lookups]
        (info,) = with_kv
        full_blocks = (num_history - 1) // info.block_tokens

        def is_written() -> bool:
            (now,) = [i for i in infos_of(served) if i.worker == info.worker]
            assert now.stats.store is not None
            return now.stats.store.num_stored >= full_blocks

        until(is_written, "the answer's blocks are not written")
        served.child(info.worker).kill()
        second = chat(served, messages)
        assert cached(second) >= 0.95 * num_history - info.block_tokens
        (other,) = [i for i in infos_of(served) if i.worker != info.worker]
        assert other.stats.num_store * other.block_tokens == cached(second)
        again = chat(served, messages)  # at whichever worker: the text is the same
        assert again["choices"][0]["message"] == second["choices"][0]["message"]


def test_two_tenants_share_nothing_but_what_is_public(tmp_path: Path) -> None:
    """One prompt, two keys: no cached token; under a public system prompt exactly that is shared."""
    public = "This is the operator's own system prompt, the same for all who ask anything here."
    prefixes = tmp_path / "prefixes.toml"
    prefixes.write_text(f"[[prefix]]\nsystem = {json.dumps(public)}\n")
    with state_of_its_own() as environ:
        keys = [_create_key(environ, tenant) for tenant in ("ada", "bob")]
        options = ("--model", "scripted", "--redis", "auto", "--port", "0")
        with serving(
            *options, "--public-prefix-file", str(prefixes), **environ | {"ANTIPHON_REDIS_URL": ""}
        ) as served:
            secret = [{"role": "user", "content": "What I say is long enough for several blocks of tokens."}]
            ask = {"model": "scripted"}
            assert cached(chat(served, secret, keys[0], **ask)) == 0
            assert cached(chat(served, secret, keys[0], **ask)) > 0
            assert cached(chat(served, secret, keys[1], **ask)) == 0
            shared = [{"role": "system", "content": public}, *secret]
            own = cached(chat(served, shared, keys[0], **ask)), cached(chat(served, shared, keys[0], **ask))
            theirs = cached(chat(served, shared, keys[1], **ask))
            assert own[0] == 0
            assert 0 < theirs <= len(public) + 64 < own[1]


def test_a_client_may_narrow_its_scope_and_not_widen_it(tmp_path: Path) -> None:
    """`cache_salt` parts a tenant from itself; another tenant's salt opens nothing."""
    with state_of_its_own() as environ:
        keys = [_create_key(environ, tenant) for tenant in ("ada", "bob")]
        with serving(
            "--model", "scripted", "--redis", "auto", "--port", "0", **environ | {"ANTIPHON_REDIS_URL": ""}
        ) as served:
            said = [{"role": "user", "content": "These words are worth a few blocks, are they not, my dear?"}]
            ask = {"model": "scripted"}
            assert cached(chat(served, said, keys[0], cache_salt="s", **ask)) == 0
            assert cached(chat(served, said, keys[0], cache_salt="s", **ask)) > 0
            assert cached(chat(served, said, keys[0], **ask)) == 0
            assert cached(chat(served, said, keys[0], cache_salt="t", **ask)) == 0
            assert cached(chat(served, said, keys[1], cache_salt="s", **ask)) == 0


def test_killed_redis_costs_no_answer() -> None:
    """kill -9 between two turns: the next one is computed, and later ones find a fresh Redis."""
    with serving(
        "--model", "scripted", "--redis", "auto", "--port", "0", "--kv-host-mib", "0", ANTIPHON_REDIS_URL=""
    ) as served:
        said = [{"role": "user", "content": "A sentence that fills a handful of blocks of sixteen bytes."}]
        text = chat(served, said, model="scripted")["choices"][0]["message"]
        server = next(c for c in served.children() if "server" in c.name() and "antiphon" not in c.name())
        server.kill()
        psutil.wait_procs([server], PATIENCE_S)
        assert chat(served, said, model="scripted")["choices"][0]["message"] == text
        (info,) = infos_of(served)
        stored = info.stats.store.num_stored if info.stats.store else 0

        def is_written_again() -> bool:
            chat(
                served,
                [{"role": "user", "content": f"Something new at {time.monotonic()}."}],
                model="scripted",
            )
            (now,) = infos_of(served)
            return now.stats.store is not None and now.stats.store.num_stored > stored

        until(is_written_again, "the fresh Redis is not used")


def _create_key(environ: dict[str, str], tenant: str) -> str:
    command = [sys.executable, "-m", "antiphon.cli.main", "keys", "create", "--tenant", tenant, "--json"]
    made = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["key"])
