"""Grants as columns: what goes in comes out, and what means nothing does not go in."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, insert, select

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant, Limits
from antiphon.store.database import Database
from antiphon.store.grants import (
    GRANT_COLUMNS,
    MAX_LIMIT,
    MAX_MODEL_CHARACTERS,
    MOST_MODELS,
    check_grant,
    columns_of,
    grant_of,
)
from antiphon.store.keys import KeyStore
from antiphon.store.schema import Base, KeyRow

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
LIMITS = Limits.__struct_fields__
limits = st.builds(Limits, **{name: st.none() | st.integers(1, MAX_LIMIT) for name in LIMITS})
names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=MAX_MODEL_CHARACTERS)
grants = st.builds(
    Grant,
    limits=limits,
    models=st.none() | st.lists(names, min_size=1, max_size=5, unique=True).map(tuple),
    priority=st.sampled_from(Priority),
    is_admin=st.booleans(),
)


def test_what_goes_in_comes_out() -> None:
    """Any grant that may be stored is the same after a round through the real table."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    row = {"id": "k", "tenant_id": "t", "name": "k", "digest": b"d", "shown": "s", "created_at": NOW}

    @given(grant=grants)
    def check(grant: Grant) -> None:
        with engine.connect() as connection:  # never committed
            connection.execute(insert(KeyRow).values(row | columns_of(grant)))
            assert grant_of(connection.execute(select(*GRANT_COLUMNS)).one()) == grant

    check()
    engine.dispose()


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("limit", [0, -1, MAX_LIMIT + 1])
def test_limits_that_mean_nothing(name: str, limit: int) -> None:
    """A limit allows something and fits every reader; the error names it."""
    with pytest.raises(BadRequest, match=name) as caught:
        check_grant(Grant(limits=Limits(**{name: limit})))
    assert caught.value.param == name


@pytest.mark.parametrize(
    "models",
    [
        (),
        ("",),
        ("a\nb",),
        ("m" * (MAX_MODEL_CHARACTERS + 1),),
        ("a", "a"),
        tuple(str(n) for n in range(MOST_MODELS + 1)),
    ],
)
def test_models_that_are_none(models: tuple[str, ...]) -> None:
    """A list of models names some, each once, in printable words."""
    with pytest.raises(BadRequest) as caught:
        check_grant(Grant(models=models))
    assert caught.value.param == "models"


GRANT = Grant(
    limits=Limits(requests_per_minute=60, tokens_per_month=10**12),
    models=("small", "große/öffentliche"),
    priority=Priority.BATCH,
    is_admin=True,
)


@pytest.fixture
async def keys(database_url: str) -> AsyncIterator[KeyStore]:
    """Keys in a new database."""
    database = await Database.open(database_url)
    yield KeyStore(database)
    await database.close()


async def test_keys_carry_their_grants(keys: KeyStore) -> None:
    """Creating, listing and owning a key tell the same grant; a change replaces it whole."""
    made, _ = await keys.create("acme", "k", GRANT)
    plain, _ = await keys.create("acme", "k")
    assert (made.grant, plain.grant) == (GRANT, FULL_GRANT)
    assert await keys.list() == [made, plain]
    owner = await keys.owner_by_id(made.id)
    assert owner is not None
    assert (owner.key_id, owner.tenant, owner.grant) == (made.id, "acme", GRANT)
    changed = await keys.change(made.id, Grant(limits=Limits(max_concurrent=2)))
    assert changed.grant == Grant(limits=Limits(max_concurrent=2))
    assert await keys.list() == [changed, plain]
    assert await keys.owner_by_id("key_0") is None
