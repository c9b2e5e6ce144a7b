"""Requests over the limits of the service level, by minute and by hour."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "latencies",
        sa.Column("figure", sa.String(8), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("limit_s", sa.Double(), nullable=False),
        sa.Column("span_s", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("squares", sa.Double(), nullable=False),
        sa.Column("over", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("figure", "segment", "limit_s", "span_s", "number", name="pk_latencies"),
    )


def downgrade() -> None:
    op.drop_table("latencies")
