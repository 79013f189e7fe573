"""Tenants and the tags of their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli.kvtenants import PUBLIC, Tenants
from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.errors import BadRequest
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import scope_tag

MAKER = ScopeMaker(bytes(32))


def test_tag_of_a_tenant_is_that_of_all_its_scopes() -> None:
    """However a client narrows its requests, its blocks are found by the tenant's name."""
    tenants = Tenants(MAKER, {"acme": "tenant_1", "local": "local"})
    narrowed = MAKER.scope("tenant_1", cache_salt="salt", prompt_cache_key="key")
    assert tenants.tag_of("acme") == scope_tag(narrowed) == scope_tag(tenants.scope_of("acme"))
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
        tenants.scope_of("acne")


def test_secret_is_this_machines(tmp_path: Path) -> None:
    """Two commands with one state folder derive the same tags, with another one others."""
    here = {"XDG_STATE_HOME": str(tmp_path / "here")}
    there = {"XDG_STATE_HOME": str(tmp_path / "there")}
    tag = Tenants.load(here).tag_of("local")
    assert Tenants.load(here).tag_of("local") == tag
    assert Tenants.load(there).tag_of("local") != tag
