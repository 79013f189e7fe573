"""Rows of usage for tests that read them."""

from __future__ import annotations

import datetime

from antiphon.store.usage import Opening

NOON = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)


def opening(row: str, **fields: object) -> Opening:
    """A request of the tenant `local`, without a key."""
    values = {"tenant_id": "local", "key_id": None, "gateway_id": "gw", "model": "asked", "endpoint": "/v1/x"}
    return Opening(id=row, **(values | {"opened_at": NOON} | fields))
