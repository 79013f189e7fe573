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
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from antiphon.store.names import MAX_NAME_CHARACTERS, MAX_TENANT_CHARACTERS

ID_CHARACTERS = 32
DIGEST_BYTES = 32
SHOWN_CHARACTERS = 32
PRIORITY_CHARACTERS = 16
REQUEST_ID_CHARACTERS = 40
MODEL_CHARACTERS = 256

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


class UsageRow(Base):
    """One request: opened when it was let in, ended once. Rows outlive the keys they name.

    `prompt_tokens` holds the cached ones too. `cost_micros`: millionths of the currency.
    """

    __tablename__ = "usage"

    id: Mapped[str] = mapped_column(String(REQUEST_ID_CHARACTERS), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_CHARACTERS))
    key_id: Mapped[str | None] = mapped_column(String(ID_CHARACTERS))  # NULL: it needed none
    client_token_id: Mapped[str | None] = mapped_column(String(64))
    gateway_id: Mapped[str] = mapped_column(String(ID_CHARACTERS))
    model: Mapped[str] = mapped_column(String(MODEL_CHARACTERS))  # that answers; at first, that was asked for
    endpoint: Mapped[str] = mapped_column(String(64))
    opened_at: Mapped[datetime.datetime] = mapped_column(UtcTime)
    closed_at: Mapped[datetime.datetime | None] = mapped_column(UtcTime)  # NULL: open
    outcome: Mapped[str | None] = mapped_column(String(48))
    status: Mapped[int | None]  # of the HTTP response
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    answer_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_micros: Mapped[int] = mapped_column(BigInteger, server_default="0")
    currency: Mapped[str | None] = mapped_column(String(3))
    is_estimated: Mapped[bool] = mapped_column(server_default=false())

    __table_args__ = (
        Index("ix_usage_opened_at", "opened_at", "id"),  # the order of exports
        Index("ix_usage_tenant_id", "tenant_id", "opened_at"),
        Index("ix_usage_key_id", "key_id", "opened_at"),
        Index(
            "ix_usage_gateway_id",
            "gateway_id",
            sqlite_where=text("closed_at IS NULL"),
            postgresql_where=text("closed_at IS NULL"),
        ),
    )


class GatewayRow(Base):
    """A gateway that writes usage, while it lives. `seen_at` changes every few seconds."""

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(String(ID_CHARACTERS), primary_key=True)
    started_at: Mapped[datetime.datetime] = mapped_column(UtcTime)
    seen_at: Mapped[datetime.datetime] = mapped_column(UtcTime)


class ErasureRow(Base):
    """A tenant was erased. Holds no name: nothing of the tenant but the id, which means nothing any more."""

    __tablename__ = "erasures"

    id: Mapped[str] = mapped_column(String(ID_CHARACTERS), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_CHARACTERS), index=True)
    erased_at: Mapped[datetime.datetime] = mapped_column(UtcTime, index=True)
    num_keys: Mapped[int] = mapped_column(BigInteger)
    removed: Mapped[str] = mapped_column(Text)  # JSON: rows by table


# Tables that hold data of tenants, each with a column `tenant_id`: erasing one goes through them in this
# order. A table that is not named here and has such a column fails a test.
TENANT_TABLES = (UsageRow, KeyRow)
