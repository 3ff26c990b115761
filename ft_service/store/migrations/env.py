"""Run by Alembic. The caller gives the connection, in a transaction, so that an upgrade happens
whole or not at all.
"""

from __future__ import annotations

from alembic import context

from ft_service.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
