"""Keys in real databases of both kinds."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.core.errors import BadRequest, NotFound
from antiphon.core.grant import FULL_GRANT
from antiphon.store.apikey import digest_of
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore


@pytest.fixture
async def keys(database_url: str) -> AsyncIterator[KeyStore]:
    """Keys in a new database."""
    database = await Database.open(database_url)
    yield KeyStore(database)
    await database.close()


def _digest(text: str) -> bytes:
    digest = digest_of(text)
    assert digest is not None
    return digest


async def test_key_is_found_by_its_digest(keys: KeyStore) -> None:
    """A new key leads to its tenant; one bit away there is nothing."""
    key, text = await keys.create("acme", "laptop")
    owner = await keys.owner(_digest(text))
    assert owner is not None
    assert (owner.key_id, owner.tenant, owner.is_revoked) == (key.id, "acme", False)
    near = bytearray(_digest(text))
    near[-1] ^= 1
    assert await keys.owner(bytes(near)) is None


async def test_key_itself_is_nowhere(tmp_path: Path) -> None:
    """Neither the file nor what SQLite writes beside it holds more of a key than is shown."""
    path = tmp_path / "keys.db"
    database = await Database.open(file_url(path))
    key, text = await KeyStore(database).create("acme", "laptop")
    stored = b"".join(file.read_bytes() for file in path.parent.iterdir())
    await database.close()
    assert key.shown.encode() in stored
    secret = text[len(key.shown) :]
    for start in range(len(secret) - 7):
        assert secret[start : start + 8].encode() not in stored


async def test_keys_of_a_tenant_share_its_id(keys: KeyStore) -> None:
    """The first key makes the tenant; the tenant `local` is there from the start, under its own name."""
    owners = []
    for tenant in ("acme", "acme", "zeta", "local"):
        _, text = await keys.create(tenant, "k")
        owners.append(await keys.owner(_digest(text)))
    first, second, third, local = (owner.tenant_id if owner else None for owner in owners)
    assert first == second != third
    assert local == "local"


async def test_tenants_are_listed(keys: KeyStore) -> None:
    """By name, with the ids that scopes are made of; `local` is one from the start."""
    assert await keys.tenants() == {"local": "local"}
    _, text = await keys.create("acme", "k")
    owner = await keys.owner(_digest(text))
    assert owner is not None
    assert await keys.tenants() == {"local": "local", "acme": owner.tenant_id}


async def test_revoked_key_is_known_as_such(keys: KeyStore) -> None:
    """A revoked key stays in the list with the time it ended; ending it again changes nothing."""
    key, text = await keys.create("acme", "laptop")
    other, _ = await keys.create("acme", "phone")
    ended = await keys.revoke(key.id)
    assert ended.revoked_at is not None
    assert await keys.revoke(key.id) == ended
    owner = await keys.owner(_digest(text))
    assert owner is not None
    assert owner.is_revoked
    assert await keys.list() == [ended, other]
    assert await keys.has_any()


@pytest.mark.parametrize("key_id", ["", "key_0", "key_0' OR '1'='1", "%", "\0", "\ud800", "x" * 1000])
async def test_unknown_key_is_not_found(keys: KeyStore, key_id: str) -> None:
    """An id that is none finds, changes and ends nothing, however it is spelled."""
    key, _ = await keys.create("acme", "laptop")
    for doing in (keys.revoke(key_id), keys.find(key_id), keys.change(key_id, FULL_GRANT)):
        with pytest.raises(NotFound, match="no key with the id"):
            await doing
    assert await keys.owner_by_id(key_id) is None
    assert await keys.list() == [key]


async def test_list_is_in_order_and_by_tenant(keys: KeyStore) -> None:
    """Oldest first; a tenant's keys alone where one is named."""
    assert not await keys.has_any()
    made = [(await keys.create(tenant, f"k{n}"))[0] for n, tenant in enumerate(["a", "b", "a"])]
    assert await keys.list() == made
    assert await keys.list("a") == [made[0], made[2]]
    for other in ("c", "", "\0", "\ud800", "A"):
        assert await keys.list(other) == []
    assert all(key.created_at.tzinfo is not None for key in made)


async def test_use_is_noted(keys: KeyStore) -> None:
    """The time of the last use is that of all the keys named, more than fit one statement."""
    made = [(await keys.create("a", "k"))[0] for _ in range(3)]
    at = datetime.datetime(2026, 12, 1, 10, 30, tzinfo=datetime.UTC)
    await keys.mark_used([made[0].id, *(f"key_{n}" for n in range(1200)), made[2].id], at)
    assert [key.last_used_at for key in await keys.list()] == [at, None, at]
    await keys.mark_used([], at)


async def test_names_of_any_language(keys: KeyStore) -> None:
    """Names of keys come back as they went in, whatever people write with."""
    for name in (
        "Büro",
        "мобильный",
        "ноутбук 💻",
        "鍵",
        "a" * 64,
        "é" * 64,
        "💻" * 64,
        "'; DROP TABLE x; --",
    ):
        key, _ = await keys.create("acme", name)
        assert (await keys.find(key.id)).name == name


async def test_tenants_are_listed_with_their_ids(keys: KeyStore) -> None:
    """By name; a tenant is there once, however many keys it has."""
    made = [await keys.create(tenant, "key") for tenant in ("acme", "zeta", "acme")]
    owners = [await keys.owner(_digest(text)) for _, text in made]
    tenants = await keys.tenants()
    assert {owner.tenant: owner.tenant_id for owner in owners if owner is not None}.items() <= tenants.items()
    assert {"acme", "zeta"} <= tenants.keys()


async def test_tenant_is_made_once(keys: KeyStore) -> None:
    """Keys created at the same time for a new tenant all belong to the one tenant."""
    created = await asyncio.gather(*(keys.create("acme", "k") for _ in range(8)))
    owners = [await keys.owner(_digest(text)) for _, text in created]
    assert len({owner.tenant_id for owner in owners if owner}) == 1


@pytest.mark.parametrize(("tenant", "name"), [("Acme", "k"), ("", "k"), ("acme", ""), ("acme", "a\nb")])
async def test_bad_names_make_nothing(keys: KeyStore, tenant: str, name: str) -> None:
    """A key whose names are refused is not there."""
    with pytest.raises(BadRequest):
        await keys.create(tenant, name)
    assert not await keys.has_any()
