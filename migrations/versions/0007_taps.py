"""Taps that ask for budgets, so that all controls count the same ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "taps",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_taps"),
    )


def downgrade() -> None:
    op.drop_table("taps")
