"""A worker's settings of the KV tiers."""

from __future__ import annotations

from antiphon.engine.kvtype import KvType
from antiphon.worker.kvsettings import KV_TYPES, KvSettings


def test_types_are_the_engines() -> None:
    """What the command line offers is what the engine has; it cannot ask: that would load llama.cpp."""
    assert tuple(KvType) == KV_TYPES


def test_store_url_is_not_shown() -> None:
    """It may hold a password, and settings may be logged."""
    assert "hunter2" not in repr(KvSettings(store_url="redis://:hunter2@host"))
