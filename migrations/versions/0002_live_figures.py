"""Cells of the engine's own figures: a channel and a metric for each cell, a fold mark for each sample."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

OLD_KEY = "uq_cells_deployment_id_draft_segment_split"
NEW_KEY = "uq_cells_deployment_id_draft_segment_split_channel_fingerprint"
WAITING = "live_folded_at IS NULL AND engine IS NOT NULL AND purpose = 'estimate'"


def upgrade() -> None:
    with op.batch_alter_table("cells") as cells:
        cells.add_column(sa.Column("channel", sa.String(length=8), nullable=False, server_default="shadow"))
        cells.add_column(sa.Column("metric", sa.String(length=32), nullable=False, server_default="hit_rate"))
        cells.add_column(sa.Column("fingerprint", sa.String(length=64), nullable=False, server_default=""))
        cells.drop_constraint(OLD_KEY, type_="unique")
        key = ["deployment_id", "draft", "segment", "split", "channel", "fingerprint"]
        cells.create_unique_constraint(NEW_KEY, key)
    op.add_column("samples", sa.Column("live_folded_at", sa.Double(), nullable=True))
    where = sa.text(WAITING)
    op.create_index("ix_samples_live", "samples", ["id"], postgresql_where=where, sqlite_where=where)


def downgrade() -> None:
    op.drop_index("ix_samples_live", "samples")
    with op.batch_alter_table("samples") as samples:
        samples.drop_column("live_folded_at")
    # Without the channel the two kinds of cells could not be told apart: those of the engine go, hours and all.
    live = "SELECT id FROM cells WHERE channel = 'live'"
    for statement in (
        f"DELETE FROM retrains WHERE cell_id IN ({live})",
        f"UPDATE events SET cell_id = NULL WHERE cell_id IN ({live})",
        f"DELETE FROM cell_hours WHERE cell_id IN ({live})",
        "DELETE FROM cells WHERE channel = 'live'",
    ):
        op.execute(statement)
    with op.batch_alter_table("cells") as cells:
        cells.drop_constraint(NEW_KEY, type_="unique")
        cells.drop_column("metric")
        cells.drop_column("channel")
        cells.drop_column("fingerprint")
        cells.create_unique_constraint(OLD_KEY, ["deployment_id", "draft", "segment", "split"])
