"""Alembic's entry: runs the steps on the connection it is handed, in that connection's transaction.

Batch mode rebuilds a table where SQLite cannot alter it; elsewhere it alters.
"""

from __future__ import annotations

from alembic import context

from antiphon.store.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
