"""What tenants and keys may be called."""

from __future__ import annotations

import pytest

from antiphon.core.errors import BadRequest
from antiphon.store.names import LOCAL_TENANT, check_key_name, check_tenant


@pytest.mark.parametrize("name", [LOCAL_TENANT, "a", "7", "acme-2.eu_west", 63 * "x"])
def test_names_of_tenants(name: str) -> None:
    """Small letters, digits and three signs."""
    assert check_tenant(name) == name


@pytest.mark.parametrize(
    "name", ["", "Acme", "-a", ".a", "a b", "a\n", "a\0", "é", "../a", "a:b", "*", 64 * "x"]
)
def test_no_names_of_tenants(name: str) -> None:
    """Nothing that means something in a path, a pattern, a log or a terminal."""
    with pytest.raises(BadRequest, match="no name for a tenant"):
        check_tenant(name)


@pytest.mark.parametrize("name", ["laptop", "Ann's laptop", "电脑", 64 * "x"])
def test_names_of_keys(name: str) -> None:
    """Anything that prints."""
    assert check_key_name(name) == name


@pytest.mark.parametrize("name", ["", " ", " a", "a\t", "a\x1b[2J", "a\u202eb", "a\nb", 65 * "x"])
def test_no_names_of_keys(name: str) -> None:
    """Nothing that moves a cursor or hides itself."""
    with pytest.raises(BadRequest, match="no name for a key"):
        check_key_name(name)
