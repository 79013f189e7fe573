"""What requests used: a row each; and the gateways that write the rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_UTC_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables. No foreign keys: what was used is written whatever has become of the key."""
    op.create_table(
        "usage",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32)),
        sa.Column("client_token_id", sa.String(64)),
        sa.Column("gateway_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("opened_at", _UTC_TIME, nullable=False),
        sa.Column("closed_at", _UTC_TIME),
        sa.Column("outcome", sa.String(48)),
        sa.Column("status", sa.Integer),
        *(
            sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
            for name in ("prompt_tokens", "cached_tokens", "answer_tokens", "cost_micros")
        ),
        sa.Column("currency", sa.String(3)),
        sa.Column("is_estimated", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.PrimaryKeyConstraint("id", name="pk_usage"),
    )
    op.create_index("ix_usage_opened_at", "usage", ["opened_at", "id"])
    op.create_index("ix_usage_tenant_id", "usage", ["tenant_id", "opened_at"])
    op.create_index("ix_usage_key_id", "usage", ["key_id", "opened_at"])
    is_open = sa.text("closed_at IS NULL")
    op.create_index(
        "ix_usage_gateway_id", "usage", ["gateway_id"], sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("started_at", _UTC_TIME, nullable=False),
        sa.Column("seen_at", _UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gateways"),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("gateways")
    op.drop_table("usage")
