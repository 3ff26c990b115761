"""Migrations of the schema: Alembic revisions in `versions/`."""
