"""Tenants and their keys."""

from __future__ import annotations

import datetime

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None

_UTC_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables, and the tenant of requests without a key."""
    tenants = op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_at", _UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("shown", sa.String(32), nullable=False),
        sa.Column("created_at", _UTC_TIME, nullable=False),
        sa.Column("last_used_at", _UTC_TIME),
        sa.Column("revoked_at", _UTC_TIME),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    now = datetime.datetime.now(datetime.UTC)
    op.bulk_insert(tenants, [{"id": "local", "name": "local", "created_at": now}])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("api_keys")
    op.drop_table("tenants")
