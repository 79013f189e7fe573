"""What is left of erased tenants: that there was one, when it went, and how much went with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "erasures",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_keys", sa.BigInteger, nullable=False),
        sa.Column("removed", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_erasures"),
    )
    op.create_index("ix_erasures_erased_at", "erasures", ["erased_at"])
    op.create_index("ix_erasures_tenant_id", "erasures", ["tenant_id"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("erasures")
