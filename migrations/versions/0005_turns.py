"""Work in turns of its segments; the day's spent budget as a figure of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

OPEN = sa.text("state IN ('pending', 'leased')")


def upgrade() -> None:
    with op.batch_alter_table("work") as work:
        work.add_column(sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.drop_index("ix_work_open", "work")
    _index(["turn"])
    op.create_table(
        "turns",
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("segment", name="pk_turns"),
    )
    op.create_table(
        "budget_days",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", name="pk_budget_days"),
    )
    op.execute(
        "INSERT INTO budget_days (day, tokens)"
        " SELECT CAST(samples.arrived_at AS BIGINT) / 86400, sum(samples.tokens) FROM samples"
        " JOIN work ON work.sample_id = samples.id GROUP BY CAST(samples.arrived_at AS BIGINT) / 86400"
    )


def downgrade() -> None:
    op.drop_table("budget_days")
    op.drop_table("turns")
    op.drop_index("ix_work_open", "work")
    with op.batch_alter_table("work") as work:
        work.drop_column("turn")
    _index([])


def _index(turn: list[str]) -> None:
    columns = ["attempts", *turn, "id"]
    op.create_index("ix_work_open", "work", columns, postgresql_where=OPEN, sqlite_where=OPEN)
