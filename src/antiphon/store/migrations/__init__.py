"""The schema's history, for Alembic. One file a step in `versions`; steps that were released never change."""
