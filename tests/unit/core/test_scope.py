"""Scopes: fixed vectors and the shape. What separates them is in tests/property/test_scopes.py."""

from __future__ import annotations

import pytest

from antiphon.core.scope import SCOPE_BYTES, TENANT_BYTES, ScopeMaker, tenant_part_of

MAKER = ScopeMaker(bytes(range(32)))


def test_scopes_stay_what_they_are() -> None:
    """A changed derivation would orphan every stored block and let two versions of a fleet disagree."""
    scope = MAKER.scope("local", cache_salt=None, prompt_cache_key=None)
    assert scope.hex() == "43c0f9f40375e8c503fa72d86ed83fb5d8be3403886e684640a3827df020e63e"
    narrowed = MAKER.scope("local", cache_salt="s", prompt_cache_key="k")
    assert narrowed.hex() == "43c0f9f40375e8c503fa72d86ed83fb5c48ebce9fa9ceef09adfed9c6317a6f0"


def test_a_tenants_scopes_begin_alike() -> None:
    """What a tenant stored under any narrowing is found by the first half of its scopes."""
    plain = MAKER.scope("t", cache_salt=None, prompt_cache_key=None)
    narrowed = MAKER.scope("t", cache_salt="x", prompt_cache_key="y")
    assert plain != narrowed
    assert tenant_part_of(plain) == tenant_part_of(narrowed) == MAKER.tenant_part("t")
    assert (len(plain), len(MAKER.tenant_part("t"))) == (SCOPE_BYTES, TENANT_BYTES)


def test_absent_is_not_empty() -> None:
    """No salt, an empty salt and a salt in the other field are three scopes."""
    scopes = {
        MAKER.scope("t", cache_salt=None, prompt_cache_key=None),
        MAKER.scope("t", cache_salt="", prompt_cache_key=None),
        MAKER.scope("t", cache_salt=None, prompt_cache_key=""),
        MAKER.scope("t", cache_salt="", prompt_cache_key=""),
    }
    assert len(scopes) == 4


@pytest.mark.parametrize("size", [0, 31, 33])
def test_secret_has_its_length(size: int) -> None:
    """A short secret is refused, not padded."""
    with pytest.raises(ValueError, match="32 bytes"):
        ScopeMaker(bytes(size))
