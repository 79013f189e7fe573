"""The admin API over real sockets and both databases."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from antiphon.core.errors import StoreUnavailable
from antiphon.core.grant import Grant, Limits
from antiphon.gateway import keyring
from antiphon.gateway.adminschema import KeyChange, LimitsChange
from antiphon.store import usagereport
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore
from antiphon.store.usage import Batch, UsageStore
from antiphon.store.usagereport import UsageRecord, Wanted
from support.booked import PRICED, chat
from support.gateways import gateway
from support.loopback import LoopbackWorker, saying
from support.usagerows import opening


@dataclass
class Administered:
    """A gateway, its database, and who may administer it."""

    client: httpx2.AsyncClient  # shows an admin key
    key: str  # of tenant acme, no admin
    database: Database

    async def chat(self, key: str) -> int:
        """The status of a chat with this key."""
        headers = {"authorization": f"Bearer {key}"}
        return (await self.client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code

    async def usage(self, path: str = "", **query: str) -> list[dict[str, Any]]:
        """What the books say, once all that was asked for has ended."""
        async with asyncio.timeout(10):
            while (await self.client.get("/admin/usage", params={"by": "key"})).json()["data"][0]["num_open"]:
                pass
        response = await self.client.get(f"/admin/usage{path}", params=query)
        assert response.status_code == 200, response.text
        assert response.headers["cache-control"] == "no-store"
        rows: list[dict[str, Any]] = response.json()["data"]
        return rows


@contextlib.asynccontextmanager
async def administered(url: str) -> AsyncIterator[Administered]:
    database = await Database.open(url)
    keys = KeyStore(database)
    _, admin = await keys.create("ops", "k", Grant(is_admin=True, models=("none",)))
    _, key = await keys.create("acme", "k")
    async with gateway(LoopbackWorker(saying("ab")), models=(PRICED,), database=url) as running:
        running.client.headers["authorization"] = f"Bearer {admin}"
        yield Administered(running.client, key, database)
    await database.close()


@pytest.fixture
async def admin(database_url: str) -> AsyncIterator[Administered]:
    async with administered(database_url) as running:
        yield running


@pytest.fixture
async def file_admin(tmp_path: Any) -> AsyncIterator[Administered]:
    """On SQLite alone: what does not touch the database much."""
    async with administered(file_url(tmp_path / "keys.db")) as running:
        yield running


async def test_usage_is_added_up_and_listed(admin: Administered) -> None:
    """Totals by each, request by request, filtered; the sums are those of the requests."""
    assert [await admin.chat(admin.key) for _ in range(3)] == [200] * 3
    (total,) = await admin.usage(by="tenant", tenant="acme")
    assert (total["group"], total["num_requests"], total["answer_tokens"]) == ("acme", 3, 6)
    rows = await admin.usage("/requests")
    assert {row["outcome"] for row in rows} == {"ok"}
    assert sum(row["cost_micros"] for row in rows) == total["cost_micros"] > 0
    assert await admin.usage("/requests", key=rows[0]["key_id"], since="2026-01-01") == rows
    assert await admin.usage("/requests", until="2026-01-01") == await admin.usage(tenant="ops") == []
    for by in ("day", "model", "key"):
        assert [row["num_requests"] for row in await admin.usage(by=by)] == [3]


@pytest.mark.parametrize("how", [{"params": {"format": "csv"}}, {"headers": {"accept": "text/csv"}}])
async def test_usage_as_csv(file_admin: Administered, how: dict[str, Any]) -> None:
    """By the query or by what is accepted; the same columns."""
    await file_admin.chat(file_admin.key)
    rows = await file_admin.usage("/requests")
    response = await file_admin.client.get("/admin/usage/requests", **how)
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    (line,) = csv.DictReader(io.StringIO(response.text))
    assert line.keys() == rows[0].keys()
    assert line["id"] == rows[0]["id"]


async def test_long_exports_come_in_pieces(file_admin: Administered, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of it, as one body; a database that goes away in the middle is no whole body."""
    monkeypatch.setattr(usagereport, "PAGE_ROWS", 10)
    await UsageStore(file_admin.database).write(Batch([opening(f"r{n:02}") for n in range(45)]))
    response = await file_admin.client.get("/admin/usage/requests")
    assert [row["id"] for row in response.json()["data"]] == [f"r{n:02}" for n in range(45)]
    assert "content-length" not in response.headers

    whole = [page async for page in usagereport.UsageReport(file_admin.database).records(Wanted())]
    later: list[Exception] = [ZeroDivisionError()]

    async def breaks(self: object, wanted: object) -> AsyncIterator[Sequence[UsageRecord]]:
        if not later:
            raise StoreUnavailable("away", detail="away")
        yield whole[0]
        yield whole[1]
        raise later.pop()

    monkeypatch.setattr(usagereport.UsageReport, "records", breaks)
    with pytest.raises(httpx2.RemoteProtocolError):
        await file_admin.client.get("/admin/usage/requests")
    response = await file_admin.client.get("/admin/usage/requests")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_key_is_made_changed_and_ended(admin: Administered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is shown once; what a change leaves out stays, null takes a limit away; it ends for good."""
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    wish = {"tenant": "acme", "name": "web", "limits": {"tokens_per_day": 10**6}, "models": ["scripted"]}
    made = (await admin.client.post("/admin/keys", json=wish)).json()
    text = made.pop("key")
    assert (made["tenant"], made["name"], made["limits"]) == ("acme", "web", {"tokens_per_day": 10**6})
    assert await admin.chat(text) == 200
    listed = (await admin.client.get("/admin/keys", params={"tenant": "acme"})).json()["data"]
    assert made["id"] in {key["id"] for key in listed}
    assert not any("key" in key for key in listed)

    async def change(**fields: object) -> dict[str, Any]:
        response = await admin.client.patch(f"/admin/keys/{made['id']}", json=fields)
        assert response.status_code == 200, response.text
        changed: dict[str, Any] = response.json()
        return changed

    changed = await change(limits={"requests_per_minute": 600}, priority="batch")
    assert changed["limits"] == {"requests_per_minute": 600, "tokens_per_day": 10**6}
    assert (changed["priority"], changed["models"], changed["is_admin"]) == ("batch", ["scripted"], False)
    changed = await change(limits={"tokens_per_day": None}, models=["other"])
    assert (changed["limits"], changed["models"]) == ({"requests_per_minute": 600}, ["other"])
    assert await admin.chat(text) == 404
    assert (await change(models=None))["models"] is None
    assert await admin.chat(text) == 200
    ended = (await admin.client.delete(f"/admin/keys/{made['id']}")).json()
    assert ended["revoked_at"] is not None
    assert await admin.chat(text) == 401
    assert (await admin.client.delete(f"/admin/keys/{made['id']}")).json() == ended


async def test_tenants(admin: Administered) -> None:
    """Made and listed; a name is taken once."""
    made = (await admin.client.post("/admin/tenants", json={"name": "new"})).json()
    assert (made["name"], made["num_keys"]) == ("new", 0)
    listed = (await admin.client.get("/admin/tenants")).json()["data"]
    assert [tenant["name"] for tenant in listed] == ["acme", "local", "new", "ops"]
    assert (await admin.client.post("/admin/tenants", json={"name": "new"})).status_code == 400


ROUTES = [
    ("GET", "/admin/usage"),
    ("GET", "/admin/usage/requests"),
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("PATCH", "/admin/keys/key_0123456789abcdef"),
    ("DELETE", "/admin/keys/key_0123456789abcdef"),
    ("GET", "/admin/tenants"),
    ("POST", "/admin/tenants"),
]


async def test_admins_alone(file_admin: Administered) -> None:
    """No key, on loopback too, and a key that is no admin: 403, in OpenAI form, before anything is read."""
    for method, path in ROUTES:
        for headers in ({"authorization": f"Bearer {file_admin.key}"}, {"authorization": ""}):
            response = await file_admin.client.request(method, path, headers=headers)
            assert response.status_code == 403, (method, path)
            assert response.json()["error"]["code"] == "permission_denied"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/admin/usage?by=request", None, 400, "by"),
        ("GET", "/admin/usage?by=hour", None, 400, "by"),
        ("GET", "/admin/usage/requests?by=day", None, 400, "by"),
        ("GET", "/admin/usage?since=yesterday", None, 400, "since"),
        ("GET", "/admin/usage?tenent=acme", None, 400, "tenent"),
        ("GET", "/admin/usage?tenant=a&tenant=b", None, 400, "tenant"),
        ("GET", "/admin/usage?format=xml", None, 400, "format"),
        ("GET", "/admin/usage?" + "&".join(f"x{n}=" for n in range(100)), None, 400, None),
        ("GET", "/admin/keys?by=day", None, 400, "by"),
        ("POST", "/admin/keys", {"limit": {}}, 400, None),
        ("POST", "/admin/keys", {"limits": {"tokens_per_day": 0}}, 400, "limits.tokens_per_day"),
        ("POST", "/admin/keys", {"limits": {"tokens_per_week": 1}}, 400, "limits"),
        ("POST", "/admin/keys", {"tenant": "No Name"}, 400, None),
        ("POST", "/admin/keys", {"priority": "urgent"}, 400, "priority"),
        ("POST", "/admin/keys", {"models": ["a", "a"]}, 400, "models"),
        ("PATCH", "/admin/keys/key_0123456789abcdef", {}, 404, None),
        ("PATCH", "/admin/keys/%00", {}, 404, None),
        ("DELETE", "/admin/keys/x'--", None, 404, None),
        ("POST", "/admin/tenants", {"name": "No Name"}, 400, None),
        ("PUT", "/admin/keys", {}, 405, None),
    ],
)
async def test_what_is_wrong_is_said(
    file_admin: Administered, method: str, path: str, body: object, status: int, param: str | None
) -> None:
    """In OpenAI's form; nothing is changed by it."""
    before = (await file_admin.client.get("/admin/keys")).json()["data"]
    response = await file_admin.client.request(method, path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    after = (await file_admin.client.get("/admin/keys")).json()["data"]
    assert [key["id"] for key in after] == [key["id"] for key in before]


def test_a_change_names_every_limit() -> None:
    """A limit that keys have and the API does not would be one that nobody can set."""
    assert LimitsChange.__struct_fields__ == Limits.__struct_fields__
    assert {*KeyChange.__struct_fields__} == {*Grant.__struct_fields__}
