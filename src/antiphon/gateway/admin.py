"""The admin API: usage, keys and tenants, for who holds an admin key and nobody else.

    GET /admin/usage                totals by day, model, tenant or key       JSON, or CSV by Accept: text/csv
    GET /admin/usage/requests       request by request, of any number         likewise
    GET, POST /admin/keys           PATCH, DELETE /admin/keys/{id}
    GET, POST /admin/tenants

Who may is decided before (access.py). Answers that may be long leave as they are read; one that breaks off
is no whole body, and clients see that. What an admin changes holds at all gateways within seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.gateway.adminschema import (
    KeyChange,
    KeyList,
    KeyObject,
    NewKey,
    NewTenant,
    TenantList,
    TenantObject,
    key_object,
)
from antiphon.gateway.models import json_response
from antiphon.gateway.parse import decoded, read_body
from antiphon.gateway.sse import watch_client
from antiphon.gateway.usageexport import csv_pieces, json_pieces, pages, time_of
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.tenants import Tenant, TenantStore
from antiphon.store.usagereport import By, UsageReport, Wanted

_MAX_BODY_BYTES = 64 * 2**10
_MAX_QUERY_FIELDS = 16
_FILTERS = frozenset({"since", "until", "tenant", "key", "by", "format"})

_key_change = msgspec.json.Decoder(KeyChange)
_new_key = msgspec.json.Decoder(NewKey)
_new_tenant = msgspec.json.Decoder(NewTenant)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Admin:
    """Its endpoints."""

    totals: AdminUsage
    requests: AdminUsage
    keys: AdminKeys
    key: AdminKey
    tenants: AdminTenants

    @classmethod
    def of(cls, database: Database) -> Self:
        """The admin API of what is in this database."""
        report, keys = UsageReport(database), KeyStore(database)
        return cls(
            AdminUsage(report, by_request=False),
            AdminUsage(report, by_request=True),
            AdminKeys(keys),
            AdminKey(keys),
            AdminTenants(TenantStore(database)),
        )


class AdminUsage:
    """GET /admin/usage, and /admin/usage/requests."""

    def __init__(self, report: UsageReport, *, by_request: bool) -> None:
        self._report = report
        self._by_request = by_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = _query(scope)
        if self._by_request and "by" in query:
            raise BadRequest("Every request has a line of its own here.", param="by")
        by = By.REQUEST if self._by_request else _by(query.get("by", By.DAY.value))
        wanted = Wanted(
            since=time_of(query["since"], "since") if "since" in query else None,
            until=time_of(query["until"], "until") if "until" in query else None,
            tenant=query.get("tenant"),
            key_id=query.get("key"),
        )
        found = pages(self._report, wanted, by)
        gone = asyncio.Event()
        async with watch_client(receive, gone.set):
            if _wants_csv(scope, query):
                await _send_pieces(_until(gone, csv_pieces(found, by)), b"text/csv; charset=utf-8", send)
            else:
                pieces = json_pieces(found, b'{"object":"list","data":', b"}")
                await _send_pieces(_until(gone, pieces), b"application/json", send)


class AdminKeys:
    """GET and POST /admin/keys."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: KeyList | KeyObject
        if scope["method"] == "POST":
            wish = await _body(scope, receive, _new_key)
            key, text = await self._keys.create(wish.tenant, wish.name, changed(FULL_GRANT, wish))
            body = key_object(key, text)
        else:
            query = _query(scope, frozenset({"tenant"}))
            body = KeyList([key_object(key) for key in await self._keys.list(query.get("tenant"))])
        response = json_response(body)
        response.headers["cache-control"] = "no-store"
        await response(scope, receive, send)


class AdminKey:
    """PATCH and DELETE /admin/keys/{id}. One that was revoked stays so."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key_id = scope["path_params"]["key_id"]
        if scope["method"] == "PATCH":
            wish = await _body(scope, receive, _key_change)
            key = await self._keys.find(key_id)
            key = await self._keys.change(key_id, changed(key.grant, wish))
        else:
            key = await self._keys.revoke(key_id)
        await json_response(key_object(key))(scope, receive, send)


class AdminTenants:
    """GET and POST /admin/tenants."""

    def __init__(self, tenants: TenantStore) -> None:
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: TenantList | TenantObject
        if scope["method"] == "POST":
            wish = await _body(scope, receive, _new_tenant)
            body = _tenant_object(await self._tenants.create(wish.name))
        else:
            _query(scope, frozenset())
            body = TenantList([_tenant_object(tenant) for tenant in await self._tenants.list()])
        await json_response(body)(scope, receive, send)


def changed(grant: Grant, wish: KeyChange) -> Grant:
    """The grant with what was wished for."""
    limits = {
        name: limit
        for name in wish.limits.__struct_fields__
        if (limit := getattr(wish.limits, name)) is not UNSET
    }
    models = grant.models
    if wish.models is not UNSET:
        models = None if wish.models is None else tuple(wish.models)
    return Grant(
        limits=msgspec.structs.replace(grant.limits, **limits),
        models=models,
        priority=grant.priority if wish.priority is UNSET else Priority[wish.priority.upper()],
        is_admin=grant.is_admin if wish.is_admin is UNSET else wish.is_admin,
    )


async def _body(scope: Scope, receive: Receive, decoder: msgspec.json.Decoder[R]) -> R:
    return decoded(await read_body(scope, receive, _MAX_BODY_BYTES), decoder)


def _query(scope: Scope, known: frozenset[str] = _FILTERS) -> Mapping[str, str]:
    """The query's fields. Raises BadRequest: a filter that is misspelt would give too much."""
    text = scope["query_string"].decode("latin-1")
    try:
        found = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise BadRequest("The query has too many fields.") from None
    for name, _ in found:
        if name not in known or sum(name == other for other, _ in found) > 1:
            names = ", ".join(sorted(known)) or "none"
            raise BadRequest(f"The query may have these fields, once each: {names}.", param=name[:40])
    return dict(found)


def _by(text: str) -> By:
    choices = [by.value for by in By if by is not By.REQUEST]
    if text not in choices:
        raise BadRequest(f"Invalid value for 'by': use one of {', '.join(choices)}.", param="by")
    return By(text)


def _wants_csv(scope: Scope, query: Mapping[str, str]) -> bool:
    form = query.get("format")
    if form is None:
        return any(name == b"accept" and value.startswith(b"text/csv") for name, value in scope["headers"])
    if form not in ("json", "csv"):
        raise BadRequest("Invalid value for 'format': use json or csv.", param="format")
    return form == "csv"


async def _until(gone: asyncio.Event, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Nothing more is read for a client that has left."""
    async for piece in pieces:
        if gone.is_set():
            return
        yield piece


async def _send_pieces(pieces: AsyncIterator[bytes], kind: bytes, send: Send) -> None:
    """Stream them. Nothing leaves before there are two: a database that is away is still a plain error."""
    begin = await anext(pieces) + await anext(pieces, b"")
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": begin, "more_body": True})
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _tenant_object(tenant: Tenant) -> TenantObject:
    return TenantObject(
        id=tenant.id, name=tenant.name, created_at=tenant.created_at, num_keys=tenant.num_keys
    )
