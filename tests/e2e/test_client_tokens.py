"""Client tokens over real sockets: made with a key, used in its stead, at every gateway, and for less."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from antiphon.core.catalogue import ModelEntry
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.gateway import keyring
from antiphon.gateway.clienttokens import Claims, ClientTokens
from antiphon.store.database import Database, file_url
from antiphon.store.keys import Key, KeyStore
from support.gateways import HELLO, MODEL, Gateway, gateway, gateway_to
from support.loopback import LoopbackWorker, saying

SECRET = bytes(range(32))
OTHER = ModelEntry(name="other", engine="scripted", context=4096)
TOKENS = "/v1/client_tokens"


@dataclass
class Fleet:
    """Two gateways over one database, and one worker of the model `scripted`."""

    gateways: tuple[Gateway, Gateway]
    worker: LoopbackWorker
    keys: KeyStore

    async def key(self, tenant: str = "acme", grant: Grant = FULL_GRANT) -> tuple[Key, dict[str, str]]:
        """A new key, and the header that shows it."""
        key, text = await self.keys.create(tenant, "k", grant)
        return key, _bearer(text)

    async def mint(self, headers: dict[str, str], **fields: object) -> httpx2.Response:
        return await self.gateways[0].client.post(TOKENS, json=fields, headers=headers)

    async def token(self, headers: dict[str, str], **fields: object) -> dict[str, Any]:
        """A token that is good."""
        response = await self.mint(headers, **fields)
        assert response.status_code == 200, response.text
        made: dict[str, Any] = response.json()
        return made

    async def chat(self, token: str, model: str = "scripted", gateway: int = 0) -> httpx2.Response:
        body = {"model": model, "messages": HELLO}
        client = self.gateways[gateway].client
        return await client.post("/v1/chat/completions", json=body, headers=_bearer(token))

    async def models(self, token: str) -> list[str]:
        response = await self.gateways[0].client.get("/v1/models", headers=_bearer(token))
        return [model["id"] for model in response.json()["data"]]


def _bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@contextlib.asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Run it."""
    url = file_url(folder / "keys.db")
    database = await Database.open(url)
    worker = LoopbackWorker(saying("hello"))
    settings: dict[str, Any] = {"database": url, "scope_secret": SECRET, "models": (MODEL, OTHER)}
    try:
        async with gateway(worker, **settings) as first, gateway_to(worker.url, **settings) as second:
            yield Fleet((first, second), worker, KeyStore(database))
    finally:
        await database.close()


async def test_token_in_a_keys_stead(tmp_path: Path) -> None:
    """The SDK takes it as its key; a second gateway knows it; the work is the key's tenant's."""
    async with fleet(tmp_path) as running:
        key, header = await running.key()
        made = await running.token(header, minutes=5, user="user-7", max_tokens=1000)
        assert abs(made["expires_at"] - time.time() - 300) < 60
        assert set(made) == {
            *("object", "id", "token", "expires_at"),
            *("models", "max_tokens", "requests_per_minute", "user"),
        }
        assert (made["object"], made["max_tokens"], made["user"]) == ("client_token", 1000, "user-7")
        url = f"{running.gateways[1].url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=made["token"], max_retries=0) as client:
            answer = await client.chat.completions.create(model="scripted", messages=HELLO)
            assert answer.choices[0].message.content == "hello"
            await client.completions.create(model="scripted", prompt="hello")
            assert {model.id async for model in client.models.list()} == {"scripted", "other"}
        assert running.worker.submits.get_nowait().tenant == "acme"
        line = (await running.gateways[1].lines.until("request.finished", 3))[0]
        assert (line["key"], line["token"], line["user"]) == (key.id, made["id"], "user-7")
        logged = str([g.lines.all for g in running.gateways])
        secret = made["token"][len("ant-ct-") :]
        assert not any(secret[at : at + 12] in logged for at in range(len(secret) - 11))


async def test_answer_with_a_token_is_kept_by_nobody(tmp_path: Path) -> None:
    """Caches between us and the key's holder are told to keep no copy."""
    async with fleet(tmp_path) as running:
        _, header = await running.key()
        assert (await running.mint(header)).headers["cache-control"] == "no-store"


async def test_token_may_ask_for_its_models_only(tmp_path: Path) -> None:
    """What it may not use does not exist for it, in lists too; a key's own models bound it, also later on."""
    async with fleet(tmp_path) as running:
        key, header = await running.key()
        narrow = (await running.token(header, models=["other"]))["token"]
        wide = (await running.token(header))["token"]
        assert await running.models(narrow) == ["other"]
        assert await running.models(wide) == ["scripted", "other"]
        refused = await running.chat(narrow)
        unknown = await running.chat(narrow, "none")
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace("scripted", "none") == unknown.text
        for path in ("/v1/models/scripted", "/v1/models/org/alias", "/v1/v1/models/scripted/"):
            response = await running.gateways[0].client.get(path, headers=_bearer(narrow))
            assert response.json()["error"]["code"] == "model_not_found"
        assert (await running.chat(wide)).status_code == 200
        _, bounded = await running.key(grant=Grant(models=("other",)))
        assert await running.models((await running.token(bounded))["token"]) == ["other"]
        for model in ("scripted", "none"):
            response = await running.mint(bounded, models=[model])
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert key.grant == FULL_GRANT


async def test_token_makes_nothing_and_administers_nothing(tmp_path: Path) -> None:
    """A token of an admin key makes no token and reads no other route than models and answers."""
    async with fleet(tmp_path) as running:
        _, admin = await running.key(grant=Grant(is_admin=True))
        token = (await running.token(admin))["token"]
        assert (await running.mint(_bearer(token))).status_code == 403
        response = await running.gateways[0].client.get("/openapi.json", headers=_bearer(token))
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
        assert (await running.mint({})).status_code == 403  # nobody's key: on loopback there is a caller


async def test_token_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its time, with its key, and with a change of one character: each time in the same words."""
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    async with fleet(tmp_path) as running:
        key, header = await running.key()
        token = (await running.token(header))["token"]
        claims = Claims(key_id=key.id, id="ct_x", expires_at=int(time.time()) - 60)
        bad = [
            ClientTokens(SECRET).seal(claims),
            token[:-1],
            f"{token}x",
            ClientTokens(bytes(32)).seal(claims),
        ]
        bodies = {(await running.chat(text)).text for text in bad}
        assert (await running.chat(token)).status_code == 200
        await running.keys.revoke(key.id)
        for gateway_of in (0, 1):
            response = await running.chat(token, gateway=gateway_of)
            assert response.status_code == 401
            bodies.add(response.text)
        bodies.add((await running.mint(header)).text)  # the key itself
        assert len(bodies) == 1
        async with AsyncOpenAI(
            base_url=f"{running.gateways[0].url}/v1", api_key=token, max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"minutes": 0}, "minutes"),
        ({"minutes": 61}, "minutes"),
        ({"minutes": 1.5}, "minutes"),
        ({"minutes": "5"}, "minutes"),
        ({"models": []}, "models"),
        ({"models": ["m"] * 17}, "models"),
        ({"models": "scripted"}, "models"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**53}, "max_tokens"),
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"user": "a b"}, "user"),
        ({"user": "a\n"}, "user"),
        ({"user": "x" * 65}, "user"),
        ({"max_token": 5}, None),  # misspelt
    ],
)
async def test_bad_wishes(tmp_path: Path, fields: dict[str, object], param: str | None) -> None:
    """Each bound of the body holds; the error names the field."""
    async with fleet(tmp_path) as running:
        _, header = await running.key()
        response = await running.mint(header, **fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("bound", [{"max_tokens": 12}, {"requests_per_minute": 1}])
async def test_token_that_is_used_up(tmp_path: Path, bound: dict[str, int]) -> None:
    """Then it gets 429, and in no list is anything amiss; its key and the key's other tokens go on."""
    async with fleet(tmp_path) as running:
        _, header = await running.key()
        small = (await running.token(header, **bound))["token"]
        other = (await running.token(header, max_tokens=100_000, requests_per_minute=100))["token"]
        statuses = [(await running.chat(small)).status_code for _ in range(4)]
        assert statuses[-1] == 429
        assert set(statuses) <= {200, 429}
        assert (await running.chat(other)).status_code == 200
        assert await running.models(small) == ["scripted", "other"]
        key = header["authorization"].removeprefix("Bearer ")
        assert (await running.chat(key)).status_code == 200
