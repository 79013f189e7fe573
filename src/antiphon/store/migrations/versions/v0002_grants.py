"""What a key allows: its limits, its models, its class, and whether it may use the admin API.

Keys made before keep all that they had: no limits, every model, the most urgent class, no admin API.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "tokens_per_day", "tokens_per_month")


def upgrade() -> None:
    """Add the columns."""
    with op.batch_alter_table("api_keys") as keys:
        for name in _LIMITS:
            keys.add_column(sa.Column(name, sa.BigInteger))
        keys.add_column(sa.Column("models", sa.Text))
        keys.add_column(sa.Column("priority", sa.String(16), nullable=False, server_default="interactive"))
        keys.add_column(sa.Column("is_admin", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("api_keys") as keys:
        for name in ("is_admin", "priority", "models", *reversed(_LIMITS)):
            keys.drop_column(name)
