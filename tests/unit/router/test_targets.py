"""Shares, sessions and order of a route's models."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.catalogue import MirrorEntry, RouteEntry, TargetEntry
from antiphon.router.targets import mirror_model, names_of, ordered_models, session_key

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1, max_size=5)


def route(weights: dict[str, float], **fields: object) -> RouteEntry:
    targets = tuple(TargetEntry(model, weight) for model, weight in weights.items())
    return RouteEntry(name="r", targets=targets, **fields)


@pytest.mark.parametrize("by_session", [True, False])
def test_shares_are_the_weights(by_session: bool) -> None:
    """Over many sessions and over many draws: 9 to 1, within four standard deviations."""
    canary, draws = route({"a": 9, "b": 1}), random.Random(5)
    first = Counter(
        ordered_models(canary, f"s{number}".encode() if by_session else b"", draws.random())[0]
        for number in range(10_000)
    )
    assert abs(first["b"] - 1000) < 120


@given(WEIGHTS, st.binary(min_size=1, max_size=8), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_session_stays_and_everybody_is_tried_once(
    weights: dict[str, float], session: bytes, first: float, second: float
) -> None:
    """The draw does not matter to it; fallbacks come last, none twice."""
    entry = route(weights, fallback=("a", "z"))
    order = ordered_models(entry, session, first)
    assert order == ordered_models(entry, session, second)
    assert sorted(order) == sorted({*weights, "a", "z"})
    assert order[-1] == "z"


@given(WEIGHTS, st.sampled_from("abcde"), st.floats(1.01, 10), st.binary(min_size=1, max_size=8))
def test_a_greater_weight_only_draws_sessions_in(
    weights: dict[str, float], model: str, factor: float, session: bytes
) -> None:
    """Whoever was not drawn to the model that grew stays where he was."""
    if model not in weights:
        return
    before = ordered_models(route(weights), session, 0.0)[0]
    after = ordered_models(route(weights | {model: weights[model] * factor}), session, 0.0)[0]
    assert after in (before, model)


def test_sessions_of_two_tenants_are_two() -> None:
    """Though they call theirs alike; without a name there is none."""
    assert session_key("t1", None, "u") != session_key("t2", None, "u")
    assert session_key("t", "k", "u") == session_key("t", "k", "other")
    assert session_key("t", None, "") == b""


def test_a_mirror_takes_its_share() -> None:
    """Below it, not at it."""
    entry = route({"a": 1}, mirror=MirrorEntry("m", 0.25))
    assert [mirror_model(entry, draw) for draw in (0.0, 0.249, 0.25, 0.9)] == ["m", "m", None, None]
    assert mirror_model(route({"a": 1}), 0.0) is None


def test_routes_go_by_name_and_alias() -> None:
    """Both lead to the same one."""
    entry = route({"a": 1}, aliases=("x", "y"))
    assert names_of([entry]) == {"r": entry, "x": entry, "y": entry}
