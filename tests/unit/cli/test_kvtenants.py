"""Tenants and the tags of their blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.cli.kvtenants import PUBLIC, Tenants
from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import scope_tag
from antiphon.store.apikey import digest_of
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore

MAKER = ScopeMaker(bytes(32))


def _scope(tenants: Tenants, name: str) -> bytes:
    return tenants.scope_of(name, cache_salt=None, prompt_cache_key=None)


def test_tag_of_a_tenant_is_that_of_all_its_scopes() -> None:
    """However a client narrows its requests, its blocks are found by the tenant's name."""
    tenants = Tenants(MAKER, {"acme": "tenant_1", "local": "local"})
    narrowed = tenants.scope_of("acme", cache_salt="salt", prompt_cache_key="key")
    assert narrowed == MAKER.scope("tenant_1", cache_salt="salt", prompt_cache_key="key")
    assert tenants.tag_of("acme") == scope_tag(narrowed) == scope_tag(_scope(tenants, "acme"))
    assert tenants.tag_of("acme") != tenants.tag_of("local")


def test_tags_have_names_where_they_are_known() -> None:
    """Tenants, public blocks, and the tag itself for everybody else."""
    tenants = Tenants(MAKER, {"acme": "tenant_1"})
    assert tenants.name_of(tenants.tag_of("acme")) == "acme"
    assert tenants.name_of(scope_tag(PUBLIC_SCOPE)) == PUBLIC
    assert tenants.name_of(b"\x01\x02\x03\x04") == "01020304"


def test_unknown_tenant_is_refused_with_those_there_are() -> None:
    """A typing error must not clear somebody else's blocks, or nobody's."""
    tenants = Tenants(MAKER, {"acme": "tenant_1", "local": "local"})
    with pytest.raises(BadRequest, match="'acne' is known here; there are acme, local"):
        tenants.tag_of("acne")
    with pytest.raises(BadRequest, match="acne"):
        _scope(tenants, "acne")


async def _create_key(url: str, tenant: str) -> str:
    database = await Database.open(url)
    _, text = await KeyStore(database).create(tenant, "key")
    owner = await KeyStore(database).owner(digest_of(text))
    await database.close()
    assert owner is not None
    return owner.tenant_id


def test_tenants_are_those_of_the_database(tmp_path: Path) -> None:
    """Who has a key, and the one that needs none; scopes are the gateway's."""
    url = file_url(tmp_path / "keys.db")
    tenant_id = asyncio.run(_create_key(url, "acme"))
    tenants = Tenants.load(url, bytes(32))
    assert _scope(tenants, "acme") == MAKER.scope(tenant_id, cache_salt=None, prompt_cache_key=None)
    assert _scope(tenants, "local") == MAKER.scope("local", cache_salt=None, prompt_cache_key=None)
    assert tenants.name_of(tenants.tag_of("acme")) == "acme"


def test_database_that_is_none_is_named(tmp_path: Path) -> None:
    """The message says which file."""
    (tmp_path / "keys.db").write_text("not a database, but long enough to be looked at" * 100)
    with pytest.raises(StoreUnavailable, match=r"keys\.db"):
        Tenants.load(file_url(tmp_path / "keys.db"), bytes(32))
