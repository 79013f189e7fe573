"""What the KV store is for, end to end: conversations outlive workers, tenants stay apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from antiphon.cli import leash
from support.kvserve import cached, chat, infos_of, num_stored, redis_of, until
from support.redisserver import RedisServer, find_redis, redis_server
from support.served import PATIENCE_S, serving, state_of_its_own

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")

LONG = " ".join(f"Rule {number}: answer shortly and be kind to number {number}." for number in range(60))


@pytest.fixture(autouse=True)
def needs_redis() -> None:
    """Each of these needs a server to start."""
    find_redis()


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
        server = redis_of(served)
        server.kill()
        psutil.wait_procs([server], PATIENCE_S)
        assert chat(served, said, model="scripted")["choices"][0]["message"] == text
        stored = num_stored(served)

        def is_written_again() -> bool:
            chat(
                served,
                [{"role": "user", "content": f"Something new at {time.monotonic()}."}],
                model="scripted",
            )
            return num_stored(served) > stored

        until(is_written_again, "the fresh Redis is not used")


def test_what_an_emptied_redis_lost_is_written_again() -> None:
    """Killed, and back empty, while a worker holds a conversation: later turns bring all of it back."""
    said = [
        {"role": "user", "content": "A sentence that fills a handful of blocks of sixteen bytes, at least."}
    ]
    options = ("--model", "scripted", "--port", "0", "--kv-host-mib", "0")
    with redis_server() as server, state_of_its_own() as environ:
        environ |= {"ANTIPHON_REDIS_URL": server.url}
        with serving(*options, **environ) as served:
            first = chat(served, said, model="scripted")
            (info,) = infos_of(served)
            num_blocks = first["usage"]["prompt_tokens"] // info.block_tokens
            until(lambda: num_stored(served) >= num_blocks, "the prompt's blocks are not written")
            written = keys_in(server)
            server.kill()
            other = [{"role": "user", "content": "Said while there is nobody who could write it down."}]
            chat(served, other, model="scripted")
            server.start()
            said += [first["choices"][0]["message"], {"role": "user", "content": "And what now?"}]

            def is_back() -> bool:
                chat(served, said, model="scripted")
                return written <= keys_in(server)

            until(is_back, "the conversation is not written again")
            second = chat(served, said, model="scripted")
        with serving(*options, **environ) as served:
            elsewhere = chat(served, said, model="scripted")
            assert elsewhere["choices"] == second["choices"]
            assert cached(elsewhere) >= num_blocks * info.block_tokens


def keys_in(server: RedisServer) -> set[bytes]:
    """All that lies in Redis."""
    with server.client() as client:
        return set(client.keys())


def _create_key(environ: dict[str, str], tenant: str) -> str:
    command = [sys.executable, "-m", "antiphon.cli.main", "keys", "create", "--tenant", tenant, "--json"]
    made = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["key"])
