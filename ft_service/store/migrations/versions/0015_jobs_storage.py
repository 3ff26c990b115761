"""How PostgreSQL stores the rows of jobs, which are written at every step that a job reports: what
never changes of one, its request and its spec, is kept beside the row, so that a new version of it
is short; pages have room for one; and old versions are removed early.
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "ALTER TABLE jobs SET (toast_tuple_target = 256, fillfactor = 80, "
            "autovacuum_vacuum_scale_factor = 0.02)"
        )
