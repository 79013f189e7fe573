"""Every route with every kind of credential, over real sockets: one table says what each of them gets."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.gateway import keyring, main
from antiphon.gateway.access import Access, Guarded
from antiphon.gateway.app import build_app
from antiphon.gateway.clienttokens import Claims, ClientTokens
from antiphon.store import keys as keystore
from antiphon.store.apikey import PREFIX, make_key
from antiphon.store.database import Database, file_url
from antiphon.store.keys import Key, KeyStore
from support.gateways import Gateway, gateway
from support.loopback import LoopbackWorker, saying

SECRET = bytes(range(32))

# Every route by its name. A route that is not here fails the test: say who may use it.
CLASSES = {
    "/v1/chat/completions": Access.CLIENT,
    "/v1/completions": Access.CLIENT,
    "/v1/models": Access.CLIENT,
    "/v1/models/{model:path}": Access.CLIENT,
    "/v1/client_tokens": Access.KEY,
    "/admin/usage": Access.ADMIN,
    "/admin/usage/requests": Access.ADMIN,
    "/admin/keys": Access.ADMIN,
    "/admin/keys/{key_id}": Access.ADMIN,
    "/admin/tenants": Access.ADMIN,
    "/openapi.json": Access.CALLER,
    "/health": Access.OPEN,
    "/metrics": Access.OPEN,
}

EVERYONE = frozenset(Access)
# Which classes a credential opens, and what it hears at the others.
EXPECTED: dict[str, tuple[frozenset[Access], int]] = {
    "admin key": (EVERYONE, 0),
    "key": (EVERYONE - {Access.ADMIN}, 403),
    "token": (frozenset({Access.OPEN, Access.CLIENT}), 403),
    "token of an admin key": (frozenset({Access.OPEN, Access.CLIENT}), 403),
}
_PARAMETER = re.compile(r"\{(?P<name>\w+)(:\w+)?\}")
NOTHING_OPENS = (frozenset({Access.OPEN}), 401)


@dataclass
class Closed:
    """A gateway that others reach, its routes, and credentials of all kinds."""

    gateway: Gateway
    keys: KeyStore
    worker: LoopbackWorker
    routes: list[Route]
    other: Key  # of another tenant

    async def credentials(self) -> Mapping[str, list[tuple[str, str]]]:
        """Headers, by what they are."""
        key, text = await self.keys.create("acme", "k")
        _, admin = await self.keys.create("acme", "k", Grant(is_admin=True))
        revoked, dead = await self.keys.create("acme", "k")
        await self.keys.revoke(revoked.id)
        token = await self.token(text)
        half = len(token) // 2
        tampered = token[:half] + ("A" if token[half] != "A" else "B") + token[half + 1 :]
        expired = Claims(key_id=key.id, id="ct_x", expires_at=int(time.time()) - 60)
        orphan = Claims(key_id=revoked.id, id="ct_x", expires_at=int(time.time()) + 60)
        unknown = Claims(key_id="key_0000000000000000", id="ct_x", expires_at=int(time.time()) + 60)
        nothing: list[tuple[str, str]] = []
        return {
            "no key": nothing,
            "empty key": [("authorization", "Bearer")],
            "key": _bearer(text),
            "admin key": _bearer(admin),
            "token": _bearer(token),
            "token of an admin key": _bearer(await self.token(admin)),
            "wrong key": _bearer("sk-wrong"),
            "key that was never made": _bearer(make_key()),
            "beginning of a key": _bearer(text[:-1]),
            "id of a key": _bearer(key.id),
            "basic": [("authorization", "Basic YTpi")],
            "key without a scheme": [("authorization", text)],
            "two keys": [*_bearer(text), *_bearer(text)],
            "key in another header": [("x-api-key", text), ("api-key", text), ("cookie", f"key={text}")],
            "revoked key": _bearer(dead),
            "expired token": _bearer(ClientTokens(SECRET).seal(expired)),
            "tampered token": _bearer(tampered),
            "token of another fleet": _bearer(ClientTokens(bytes(32)).seal(expired)),
            "token of a revoked key": _bearer(ClientTokens(SECRET).seal(orphan)),
            "token of no key": _bearer(ClientTokens(SECRET).seal(unknown)),
            "SQL": _bearer("' OR 1=1; --"),
        }

    async def token(self, key: str) -> str:
        """A client token, made with this key."""
        response = await self.gateway.client.post("/v1/client_tokens", json={}, headers=_bearer(key))
        token: str = response.json()["token"]
        return token

    def path_of(self, route: Route) -> str:
        """One path of the route; ids in it are another tenant's."""
        return _PARAMETER.sub(lambda m: "scripted" if m["name"] == "model" else self.other.id, route.path)

    async def status(self, path: str, headers: list[tuple[str, str]], method: str = "GET") -> int:
        """What is answered to exactly this path."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        host = "" if any(name == "host" for name, _ in headers) else "Host: localhost\r\n"
        request = f"{method} {path} HTTP/1.1\r\n{host}{lines}Connection: close\r\n\r\n"
        return int((await self.gateway.raw(request.encode("latin-1"))).split(b" ", 2)[1])


def _bearer(text: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {text}")]


@contextlib.asynccontextmanager
async def closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Closed]:
    """Run it."""
    apps: list[Starlette] = []

    def build(*parts: object) -> Starlette:
        apps.append(build_app(*parts))  # type: ignore[arg-type]  # handed through
        return apps[0]

    monkeypatch.setattr(main, "build_app", build)
    url = file_url(folder / "keys.db")
    database = await Database.open(url)
    keys = KeyStore(database)
    other, _ = await keys.create("zeta", "k")
    worker = LoopbackWorker(saying("hello"))
    try:
        async with gateway(worker, database=url, scope_secret=SECRET, host="0.0.0.0") as running:
            routes = [route for route in apps[0].routes if isinstance(route, Route)]
            assert len(routes) == len(apps[0].routes)  # nothing is mounted beside them
            yield Closed(running, keys, worker, routes, other)
    finally:
        await database.close()


async def test_every_route_with_every_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not opened by its class is 401 or 403, in the same words; what is, reaches its endpoint."""
    async with closed(tmp_path, monkeypatch) as running:
        assert {route.name for route in running.routes} == CLASSES.keys()
        bodies: dict[tuple[int, bool], set[str]] = {}
        for name, headers in (await running.credentials()).items():
            opened, refusal = EXPECTED.get(name, NOTHING_OPENS)
            for route in running.routes:
                assert isinstance(route.endpoint, Guarded)
                access = CLASSES[route.name]
                assert route.endpoint.access is access, route.path
                for method in sorted(route.methods or ()):
                    path = running.path_of(route)
                    response = await running.gateway.client.request(method, path, headers=headers)
                    where = (name, method, path, response.status_code)
                    if access in opened:
                        assert response.status_code not in (401, 403), where
                        assert response.status_code < 500, where
                        continue
                    assert response.status_code == refusal, where
                    assert ("www-authenticate" in response.headers) == (refusal == 401)
                    if method != "HEAD":
                        is_none = name in ("no key", "empty key", "key in another header")
                        bodies.setdefault((refusal, is_none), set()).add(response.text)
        assert len(bodies[401, True]) == len(bodies[401, False]) == 1
        assert json.loads(*bodies[401, False])["error"]["code"] == "invalid_api_key"
        assert running.worker.submits.empty()


# Spellings that a router and a guard could read differently. None of them is an open route.
ODD_PATHS = [
    *(
        "/",
        "/v1",
        "/nothing",
        "//v1/models",
        "//admin/keys",
        "/admin",
        "/v1/../admin/keys",
        "/v1/%2e%2e/admin/keys",
    ),
    *("/health/../v1/models", "/health%2f..%2fv1/models", "/v1/models;x", "/HEALTH", "/health//", "//health"),
    *("/metrics/x", "/metrics;x", "/v1/%6dodels", "/healthz", "/health%00", "/health.", "/health%20"),
    *("/v1/models/..%2f..%2fhealth", "/./health", "/health/.", "/v1/client_tokens%2f", "/v1/client_tokens;x"),
    *(
        "/v1//client_tokens",
        "/admin/keys;x",
        "/admin/keys%2f",
        "/ADMIN/keys",
        "/v1/admin/keys",
        "/admin%2fkeys",
        "/v1/v1/v1/models",
        "/%2fhealth",
        "/openapi.json%00",
        "/\\health",
        "/v1/models?/health",
    ),
    "http://localhost/v1/models",
    "http://health/v1/models",
]
ODD_HEADERS = [
    ("x-original-url", "/health"),
    ("x-rewrite-url", "/health"),
    ("x-forwarded-for", "127.0.0.1"),
    ("x-forwarded-host", "localhost"),
    ("x-forwarded-proto", "https"),
    ("x-forwarded-prefix", "/health"),
    ("x-http-method-override", "GET"),
    ("forwarded", "for=127.0.0.1;host=localhost"),
    ("x-real-ip", "127.0.0.1"),
    ("origin", "http://localhost"),
    ("user-agent", "antiphon"),
    ("upgrade", "websocket"),
]
BAD_HOSTS = ["a/?x=", "a/#", "evil/v1/models?", "a/health", "@localhost", "a b"]


async def test_odd_paths_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a good key each is 401, whatever it leads to; with a token none leads beyond its class."""
    async with closed(tmp_path, monkeypatch) as running:
        credentials = await running.credentials()
        for path in ODD_PATHS:
            for name in ("no key", "wrong key"):
                assert await running.status(path, credentials[name]) == 401, (path, name)
            assert await running.status(path, credentials["token"], "POST") in (403, 404, 405, 415), path


async def test_headers_of_proxies_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No header but the key's decides: each route answers as without it. A Host that is none is a 400."""
    async with closed(tmp_path, monkeypatch) as running:
        credentials = await running.credentials()
        for name in ("no key", "token", "key"):
            opened, refusal = EXPECTED.get(name, NOTHING_OPENS)
            for route in running.routes[::2]:
                method, path = min(route.methods or ()), running.path_of(route)
                clean = await running.status(path, credentials[name], method)
                assert (clean == refusal) == (CLASSES[route.name] not in opened)
                for header in ODD_HEADERS:
                    assert await running.status(path, [*credentials[name], header], method) == clean, header
        for host in BAD_HOSTS:
            for path in ("/health", "/v1/models"):
                assert await running.status(path, [("host", host)]) == 400


async def test_keys_that_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are told apart by all of their characters: remembered or not, revoked or not."""
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    async with closed(tmp_path, monkeypatch) as running:
        alike = [PREFIX + "A" * 47 + last for last in "xyz"]
        made = iter(alike[:2])
        monkeypatch.setattr(keystore, "make_key", lambda: next(made))
        (first, _), _ = [await running.keys.create(tenant, "k", FULL_GRANT) for tenant in ("acme", "zeta")]
        assert [await running.status("/v1/models", _bearer(key)) for key in alike] == [200, 200, 401]
        lines = await running.gateway.lines.until("request.finished", 3)
        assert [line.get("tenant") for line in lines] == ["acme", "zeta", None]
        await running.keys.revoke(first.id)
        assert [await running.status("/v1/models", _bearer(key)) for key in alike] == [401, 200, 401]


SQL = [
    "' OR 1=1; --",
    "'; DROP TABLE api_keys; --",
    '" UNION SELECT * FROM api_keys --',
    "x' OR pg_sleep(10) --",
    "%' OR '1'='1",
    PREFIX + "' OR '1'='1' --" + "A" * 33,
    "key_' OR 1=1; --",
    "\\'; SELECT 1; --",
]


@pytest.mark.parametrize("text", SQL)
async def test_sql_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """In keys, in what tokens are sealed with, in names and labels it is a wrong one; the tables stand."""
    async with closed(tmp_path, monkeypatch) as running:
        key, good = await running.keys.create("acme", "k")
        ends_at = int(time.time()) + 60
        sealed = ClientTokens(SECRET).seal(Claims(key_id=text, id=text, expires_at=ends_at))
        for wrong in (text, f"ant-ct-{text}", sealed):
            assert await running.status("/v1/models", _bearer(wrong)) == 401
        client, header = running.gateway.client, dict(_bearer(good))
        assert (await client.get(f"/v1/models/{text}", headers=header)).status_code == 404
        labelled = header | {"x-request-id": text}
        fields = {"model": text, "messages": [{"role": "user", "content": text}], "user": text}
        assert (await client.post("/v1/chat/completions", json=fields, headers=labelled)).status_code == 404
        for body in ({"models": [text]}, {"user": text}):
            response = await client.post("/v1/client_tokens", json=body, headers=header)
            assert response.status_code in (400, 404)
        assert [k.id for k in await running.keys.list("acme")] == [key.id]
