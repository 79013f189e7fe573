"""What a key allows, as columns of its row: the one place that knows how a `Grant` is stored.

Invariants: what is stored passed `check_grant`; a row gives back exactly the grant it was made of.
Limits are columns of their own and NULL where there is none; models are JSON text, NULL for all.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import Grant, Limits
from antiphon.store.schema import KeyRow

MOST_MODELS = 256
MAX_MODEL_CHARACTERS = 256
MAX_LIMIT = 2**53 - 1  # what every JSON reader keeps exactly

_LIMIT_NAMES = Limits.__struct_fields__
_MODELS = msgspec.json.Decoder(tuple[str, ...])

GRANT_COLUMNS = (
    *(getattr(KeyRow, name) for name in _LIMIT_NAMES),
    KeyRow.models,
    KeyRow.priority,
    KeyRow.is_admin,
)


def check_grant(grant: Grant) -> Grant:
    """The grant, where it can be stored and means something. Raises BadRequest."""
    for name in _LIMIT_NAMES:
        limit = getattr(grant.limits, name)
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise BadRequest(f"{name} must be from 1 to {MAX_LIMIT}, not {limit}", param=name)
    models = grant.models
    if models is None:
        return grant
    if not 0 < len(models) <= MOST_MODELS:
        raise BadRequest(
            f"name 1 to {MOST_MODELS} models that a key may use, or none for all", param="models"
        )
    for model in models:
        if not 0 < len(model) <= MAX_MODEL_CHARACTERS or not model.isprintable():
            raise BadRequest(f"{model[:64]!r} is no name of a model", param="models")
    if len(set(models)) < len(models):
        raise BadRequest("a model is named twice", param="models")
    return grant


def columns_of(grant: Grant) -> dict[str, Any]:
    """Values for the row's columns, by name. Raises BadRequest."""
    check_grant(grant)
    return {
        **{name: getattr(grant.limits, name) for name in _LIMIT_NAMES},
        "models": None if grant.models is None else msgspec.json.encode(grant.models).decode(),
        "priority": grant.priority.name.lower(),
        "is_admin": grant.is_admin,
    }


def grant_of(row: Row[*tuple[Any, ...]]) -> Grant:
    """The grant of a row that has the columns in `GRANT_COLUMNS`."""
    return Grant(
        limits=Limits(**{name: getattr(row, name) for name in _LIMIT_NAMES}),
        models=None if row.models is None else _MODELS.decode(row.models),
        priority=Priority[row.priority.upper()],
        is_admin=row.is_admin,
    )
