"""What a key allows."""

from __future__ import annotations

import msgspec

from antiphon.core.grant import FULL_GRANT, Grant, Limits


def test_no_limit_is_not_a_bound() -> None:
    """Only a number is a bound; zero is one."""
    assert not Limits().is_bounded
    assert Limits(tokens_per_day=0).is_bounded


def test_models_are_those_listed_or_all() -> None:
    """No list allows every model, an empty one none."""
    assert FULL_GRANT.allows("any")
    assert Grant(models=("a",)).allows("a")
    assert not Grant(models=("a",)).allows("b")
    assert not Grant(models=()).allows("a")


def test_grants_survive_the_wire() -> None:
    """They are kept in signed tokens and in the database as JSON."""
    grant = Grant(limits=Limits(tokens_per_minute=7), models=("a", "b"), is_admin=True)
    assert msgspec.json.decode(msgspec.json.encode(grant), type=Grant) == grant
