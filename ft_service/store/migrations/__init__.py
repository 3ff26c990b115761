"""How the schema came to be, step by step: Alembic revisions in `versions/`."""
