"""Keys, tenants and scopes over real sockets: who gets in, and what goes down to the worker with it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from antiphon.core.generation import Generation
from antiphon.core.scope import ScopeMaker, tenant_part_of
from antiphon.gateway import keyring
from antiphon.store.apikey import make_key
from antiphon.store.database import Database, file_url
from antiphon.store.keys import Key, KeyStore
from support.gateways import HELLO, Gateway, gateway
from support.loopback import LoopbackWorker, saying

SECRET = bytes(range(32))


@dataclass
class Keyed:
    """A gateway whose database the test holds too."""

    gateway: Gateway
    worker: LoopbackWorker
    keys: KeyStore
    path: Path

    async def create(self, tenant: str = "acme") -> tuple[Key, str]:
        return await self.keys.create(tenant, "k")

    async def chat(self, key: str | None, **fields: object) -> Generation:
        """One chat with this key; what the worker got of it."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": "scripted", "messages": HELLO} | fields
        response = await self.gateway.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return self.worker.submits.get_nowait()

    async def status(self, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await self.gateway.client.get("/v1/models", headers=headers)).status_code

    @contextlib.asynccontextmanager
    async def sdk(self, key: str) -> AsyncIterator[AsyncOpenAI]:
        async with AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=key, max_retries=0) as client:
            yield client


@contextlib.asynccontextmanager
async def keyed(folder: Path, **settings: Any) -> AsyncIterator[Keyed]:
    """A gateway in front of a worker, over a database in this folder that has one key of tenant `first`."""
    path = folder / "keys.db"
    database = await Database.open(file_url(path))
    keys = KeyStore(database)
    await keys.create("first", "k")
    worker = LoopbackWorker(saying("hello"))
    values = {"database": file_url(path), "scope_secret": SECRET} | settings
    try:
        async with gateway(worker, **values) as running:
            yield Keyed(running, worker, keys, path)
    finally:
        await database.close()


async def test_sdk_with_a_key(tmp_path: Path) -> None:
    """A good key answers; a wrong one is the SDK's AuthenticationError, in OpenAI's form."""
    async with keyed(tmp_path) as running:
        _, key = await running.create()
        async with running.sdk(key) as client:
            answer = await client.chat.completions.create(model="scripted", messages=HELLO)
            assert answer.choices[0].message.content == "hello"
            assert [model.id async for model in client.models.list()] == ["scripted"]
        for wrong in ("anything", make_key(), key[:-1], key + "x", "' OR 1=1; --"):
            async with running.sdk(wrong) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.chat.completions.create(model="scripted", messages=HELLO)
                assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
                assert wrong not in caught.value.message
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()


async def test_newcomers_key_is_taken_until_there_are_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`api_key="anything"` works on loopback out of the box, and ends with the first key."""
    monkeypatch.setattr(keyring, "TTL_S", 0.02)
    url = file_url(tmp_path / "keys.db")
    worker = LoopbackWorker(saying("hello"))
    async with gateway(worker, database=url) as running:
        anything = {"authorization": "Bearer anything"}
        assert (await running.client.get("/v1/models", headers=anything)).status_code == 200
        database = await Database.open(url)
        await KeyStore(database).create("acme", "k")
        async with asyncio.timeout(10):
            while (await running.client.get("/v1/models", headers=anything)).status_code != 401:
                pass  # asking takes its time
        await running.proves_alive()  # without a key: still the tenant `local`
        await database.close()


async def test_required_keys_are_required_on_loopback_too(tmp_path: Path) -> None:
    """Before there is one nobody gets in, then its holder; the process's own state stays open."""
    async with keyed(tmp_path, require_key=True) as running:
        client = running.gateway.client
        body = {"model": "scripted", "messages": HELLO}
        assert (await running.gateway.chat()).status_code == 401
        any_key = {"authorization": "Bearer any"}
        assert (await client.post("/v1/chat/completions", json=body, headers=any_key)).status_code == 401
        _, text = await running.create()
        key = {"authorization": f"Bearer {text}"}
        assert (await client.post("/v1/chat/completions", json=body, headers=key)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_revoked_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running gateway stops taking it, as soon as it asks again; another key of the tenant goes on."""
    monkeypatch.setattr(keyring, "TTL_S", 0.02)
    async with keyed(tmp_path) as running:
        key, text = await running.create()
        _, other = await running.create()
        assert await running.status(text) == 200
        await running.keys.revoke(key.id)
        async with asyncio.timeout(10):
            while await running.status(text) != 401:
                pass
        assert await running.status(other) == 200


async def test_tenants_have_scopes_of_their_own(tmp_path: Path) -> None:
    """The key decides tenant and scope: alike for keys of one tenant, apart for two, `local` without one."""
    async with keyed(tmp_path) as running:
        keys = [None, *[(await running.create(tenant))[1] for tenant in ("acme", "acme", "zeta")]]
        local, acme, again, zeta = [await running.chat(key) for key in keys]
        assert [g.tenant for g in (local, acme, again, zeta)] == ["local", "acme", "acme", "zeta"]
        assert acme.scope == again.scope
        assert len({local.scope, acme.scope, zeta.scope}) == 3
        assert local.scope == ScopeMaker(SECRET).scope("local", cache_salt=None, prompt_cache_key=None)


async def test_clients_only_narrow(tmp_path: Path) -> None:
    """Salt and cache key split a tenant's scope; names of end users do not; nothing leaves the tenant."""
    async with keyed(tmp_path) as running:
        _, acme = await running.create("acme")
        _, zeta = await running.create("zeta")
        plain = await running.chat(acme)
        narrowed = [
            await running.chat(acme, cache_salt="a"),
            await running.chat(acme, cache_salt="b"),
            await running.chat(acme, prompt_cache_key="a"),
            await running.chat(acme, cache_salt="a", prompt_cache_key="a"),
        ]
        assert len({g.scope for g in [plain, *narrowed]}) == 5
        assert {tenant_part_of(g.scope) for g in narrowed} == {tenant_part_of(plain.scope)}
        assert (await running.chat(acme, cache_salt="a")).scope == narrowed[0].scope
        for same in (
            {"user": "u"},
            {"safety_identifier": "s"},
            {"prompt_cache_key": ""},
            {"cache_salt": None},
        ):
            assert (await running.chat(acme, **same)).scope == plain.scope
        stolen = await running.chat(zeta, cache_salt=plain.scope.hex())
        assert tenant_part_of(stolen.scope) != tenant_part_of(plain.scope)
        strange = [
            await running.chat(acme, cache_salt=salt) for salt in (":", "*", "\0", "\r\n", "é", "x" * 256)
        ]
        assert len({g.scope for g in strange}) == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 7),
        ("cache_salt", ["a"]),
        ("prompt_cache_key", "x" * 257),
        ("prompt_cache_key", {"a": 1}),
    ],
)
async def test_bad_words_are_refused(tmp_path: Path, field: str, value: object) -> None:
    """Type and length are checked; the error names the field."""
    async with keyed(tmp_path) as running:
        response = await running.gateway.chat(**{field: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        await running.gateway.proves_alive()


async def test_public_prefix_is_counted(tmp_path: Path) -> None:
    """The worker hears how much of a prompt the operator made public: nothing of any other prompt."""
    system = "You are Acme's assistant. " * 8
    async with keyed(tmp_path, public_systems=(system,)) as running:
        for key in (None, (await running.create())[1]):
            public = await running.chat(key, messages=[{"role": "developer", "content": system}, *HELLO])
            assert len(system) < public.num_public_tokens < public.num_prompt_tokens
            private = await running.chat(key, messages=[{"role": "system", "content": system[:-2]}, *HELLO])
            assert private.num_public_tokens == 0


def _execute(path: Path, statement: str) -> None:
    """Beside the event loop: the gateway in this process must get on with what it writes."""
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute(statement)


async def test_broken_database_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a key get a 503 that says to come again; on loopback those without one are answered."""
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    async with keyed(tmp_path) as running:
        _, key = await running.create()
        assert await running.status(key) == 200
        await asyncio.to_thread(_execute, running.path, "ALTER TABLE api_keys RENAME TO gone")
        for some in (key, make_key()):
            response = await running.gateway.client.get(
                "/v1/models", headers={"authorization": f"Bearer {some}"}
            )
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "store_unavailable"
            assert "retry-after" in response.headers
            assert not any(word in response.text for word in ("api_keys", "SELECT", str(running.path)))
        assert await running.status("anything") == 401  # there were keys
        await running.gateway.proves_alive()
        await asyncio.to_thread(_execute, running.path, "ALTER TABLE gone RENAME TO api_keys")
        assert await running.status(key) == 200


async def test_log_knows_who_and_holds_no_key(tmp_path: Path) -> None:
    """Each line of a request names tenant and key id; no part of a key is logged, good or wrong."""
    async with keyed(tmp_path) as running:
        key, text = await running.create()
        wrong = make_key()
        await running.chat(text)
        await running.status(wrong)
        await running.gateway.chat()
        lines = await running.gateway.lines.until("request.finished", 3)
        assert [(line.get("tenant"), line.get("key")) for line in lines] == [
            ("acme", key.id),
            (None, None),
            ("local", None),
        ]
        logged = str(running.gateway.lines.all)
        for secret in (text[16:], wrong[16:]):
            assert not any(secret[at : at + 8] in logged for at in range(len(secret) - 7))


async def test_use_is_noted_at_the_end(tmp_path: Path) -> None:
    """A gateway that stops writes down which keys were used."""
    async with keyed(tmp_path) as running:
        key, text = await running.create()
        await running.chat(text)
        path = running.path
    database = await Database.open(file_url(path))
    used = {k.id: k.last_used_at for k in await KeyStore(database).list()}
    await database.close()
    assert used.pop(key.id) is not None
    assert set(used.values()) == {None}
