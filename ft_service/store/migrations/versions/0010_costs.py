"""Add what jobs cost and may cost, and their energy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("engines", sa.Column("price", sa.BigInteger(), nullable=True))
    op.add_column("engines", sa.Column("currency", sa.Text(), nullable=True))
    op.add_column("engines", sa.Column("grams_per_kwh", sa.Double(), nullable=True))
    op.add_column("engines", sa.Column("joules", sa.Double(), nullable=True))
    op.add_column("engines", sa.Column("energy", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("max_cost", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("price", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("currency", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("grams_per_kwh", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("cost", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("joules", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("attempt_joules", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("co2_grams", sa.Double(), nullable=True))
    op.add_column("usage", sa.Column("cost", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("usage", sa.Column("currency", sa.Text(), nullable=True))
    op.add_column("usage", sa.Column("joules", sa.Double(), server_default="0", nullable=False))
    op.add_column("usage", sa.Column("co2_grams", sa.Double(), server_default="0", nullable=False))
