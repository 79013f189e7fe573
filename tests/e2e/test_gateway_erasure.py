"""A tenant is erased under a gateway that serves it: open answers end, keys do not work, workers are told."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.core.generation import Generation, Terminal
from antiphon.core.scope import ScopeMaker
from antiphon.gateway import erasures, keyring
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.tenants import TenantStore
from support.gateways import HELLO, events_of, gateway, text_of
from support.loopback import LoopbackWorker, Session, frames_of, saying

SECRET = bytes(range(32))


class _Held:
    """Says one word, and the rest when the test lets it."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, session: Session, generation: Generation) -> None:
        first, *rest = frames_of(generation, list(b"one two"), 4, Terminal.STOP)
        await session.send(*first)
        self.has_begun.set()
        await self.may_end.wait()
        for frame in rest:
            await session.send(*frame)


async def test_a_tenant_is_erased_in_mid_answer(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes whole; the key is refused as soon as the ring has let go; other tenants go on."""
    monkeypatch.setattr(erasures, "EVERY_S", 0.05)
    monkeypatch.setattr(keyring, "TTL_S", 0.05)
    database = await Database.open(database_url)
    keys, tenants = KeyStore(database), TenantStore(database)
    _, ada = await keys.create("ada", "k")
    _, bob = await keys.create("bob", "k")
    ada_id = await tenants.find("ada")
    held = _Held()
    worker = LoopbackWorker(held)
    async with (
        gateway(worker, database=database_url, scope_secret=SECRET) as running,
        asyncio.timeout(30),
    ):
        body = {"model": "scripted", "messages": HELLO, "stream": True}

        async def ask(key: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {key}"}
            reply = await running.client.post("/v1/chat/completions", json=body, headers=headers)
            return reply.status_code, reply.text

        answer = asyncio.create_task(ask(ada))
        await held.has_begun.wait()
        assert worker.forgets.empty()
        erased = await tenants.erase(ada_id)
        assert erased.removed["api_keys"] == 1
        assert await worker.forgets.get() == [ScopeMaker(SECRET).tenant_part(ada_id)]
        held.may_end.set()
        status, text = await answer
        assert (status, text_of(events_of(text))) == (200, "one two")
        assert text.endswith("data: [DONE]\n\n")
        worker.script = saying("three")
        while (await ask(ada))[0] != 401:  # the ring remembers it for a moment
            pass
        status, text = await ask(bob)
        assert (status, text_of(events_of(text))) == (200, "three")
        (line,) = running.lines.named("tenant.erased")
        assert line["tenant"] == ada_id
        assert "ada" not in {str(value) for value in line.values()}
    await tenants.sweep(ada_id)
    assert await tenants.count(ada_id) == {"usage": 0, "api_keys": 0}
    assert (await tenants.count(await tenants.find("bob")))["api_keys"] == 1
    await database.close()
