"""The tables, as Python sees them. What the database holds is made by store/migrations.

Invariants: only types that SQLite and PostgreSQL share; times are UTC and come back aware; of a key
there is its digest and the few characters that are shown, never the key.
"""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    LargeBinary,
    MetaData,
    String,
    Text,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from antiphon.store.names import MAX_NAME_CHARACTERS, MAX_TENANT_CHARACTERS

ID_CHARACTERS = 32
DIGEST_BYTES = 32
SHOWN_CHARACTERS = 32
PRIORITY_CHARACTERS = 16

# Constraints have names, so that later migrations can change them on every database.
_CONVENTION = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ix": "ix_%(table_name)s_%(column_0_name)s",
}


class UtcTime(TypeDecorator[datetime.datetime]):
    """Aware times in UTC. SQLite keeps no zone, so it is attached when they come back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime.datetime | None, dialect: Dialect) -> Any:
        """Refuses times without a zone: nobody could say what they mean."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(datetime.UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime.datetime | None:
        if value is None:
            return None
        assert isinstance(value, datetime.datetime)
        if value.tzinfo is None:
            return value.replace(tzinfo=datetime.UTC)
        return value.astimezone(datetime.UTC)


class Base(DeclarativeBase):
    """All tables."""

    metadata = MetaData(naming_convention=_CONVENTION)


class TenantRow(Base):
    """Whose requests and whose data. The id never changes and is never used again."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(ID_CHARACTERS), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_TENANT_CHARACTERS), unique=True)
    created_at: Mapped[datetime.datetime] = mapped_column(UtcTime)


class KeyRow(Base):
    """One key. Rows stay when keys are revoked, so that it is known what they were."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(ID_CHARACTERS), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARACTERS))
    digest: Mapped[bytes] = mapped_column(LargeBinary(DIGEST_BYTES), unique=True)
    shown: Mapped[str] = mapped_column(String(SHOWN_CHARACTERS))  # the key's first characters
    created_at: Mapped[datetime.datetime] = mapped_column(UtcTime)
    last_used_at: Mapped[datetime.datetime | None] = mapped_column(UtcTime)  # to a minute or so
    revoked_at: Mapped[datetime.datetime | None] = mapped_column(UtcTime)

    # What it allows; store/grants.py reads and writes these. A limit that is NULL is none.
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    max_concurrent: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_month: Mapped[int | None] = mapped_column(BigInteger)
    models: Mapped[str | None] = mapped_column(Text)  # a JSON list of names; NULL: all
    priority: Mapped[str] = mapped_column(String(PRIORITY_CHARACTERS), server_default="interactive")
    is_admin: Mapped[bool] = mapped_column(server_default=false())
