"""Retrains with every state and its history; candidates and the samples that they were judged on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    with op.batch_alter_table("retrains") as retrains:
        retrains.alter_column("cell_id", existing_type=ID, nullable=True)
        retrains.add_column(sa.Column("model", sa.Text(), nullable=False, server_default=""))
        retrains.add_column(sa.Column("draft", sa.Text(), nullable=False, server_default=""))
        retrains.add_column(sa.Column("decision", JSON, nullable=True))
        retrains.add_column(sa.Column("trained_on", sa.LargeBinary(), nullable=True))
        retrains.add_column(sa.Column("token_sha256", sa.String(length=64), nullable=True))
    op.execute(
        "UPDATE retrains SET draft = (SELECT cells.draft FROM cells WHERE cells.id = retrains.cell_id),"
        " model = (SELECT deployments.model FROM cells JOIN deployments ON deployments.id = cells.deployment_id"
        " WHERE cells.id = retrains.cell_id)"
    )
    op.create_index("ix_replays_draft", "replays", ["draft", "id"])
    op.create_index("ix_retrains_draft", "retrains", ["model", "draft", "state"])
    op.create_table(
        "retrain_steps",
        sa.Column("id", ID, nullable=False),
        sa.Column("retrain_id", sa.String(length=64), nullable=False),
        sa.Column("before", sa.String(length=16), nullable=True),
        sa.Column("after", sa.String(length=16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["retrain_id"], ["retrains.id"], name="fk_retrain_steps_retrain_id_retrains", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_retrain_steps"),
    )
    op.create_index("ix_retrain_steps_retrain_id", "retrain_steps", ["retrain_id"])
    op.execute(
        "INSERT INTO retrain_steps (retrain_id, after, at, reason)"
        " SELECT id, state, updated_at, reason FROM retrains ORDER BY created_at, id"
    )
    op.create_table(
        "candidates",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("retrain_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("incumbent", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("incumbent_fingerprint", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("history_until", ID, nullable=False),
        sa.Column("queued_until", ID, nullable=False),
        sa.Column("queued_live", sa.Integer(), nullable=False),
        sa.Column("verdict", JSON, nullable=True),
        sa.Column("details", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["retrain_id"], ["retrains.id"], name="fk_candidates_retrain_id_retrains"),
        sa.PrimaryKeyConstraint("id", name="pk_candidates"),
    )
    op.create_index("ix_candidates_retrain_id", "candidates", ["retrain_id"])
    op.create_table(
        "pairs",
        sa.Column("candidate_id", sa.String(length=64), nullable=False),
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("taken", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("served_at", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Double(), nullable=False),
        sa.Column("tested", sa.Double(), nullable=False),
        sa.Column("steps", sa.Double(), nullable=False),
        sa.Column("incumbent_accepted", sa.Double(), nullable=False),
        sa.Column("incumbent_tested", sa.Double(), nullable=False),
        sa.Column("incumbent_steps", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["candidate_id"], ["candidates.id"], name="fk_pairs_candidate_id_candidates", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("candidate_id", "sample_id", name="pk_pairs"),
    )


def downgrade() -> None:
    op.drop_table("pairs")
    op.drop_table("candidates")
    op.drop_table("retrain_steps")
    op.drop_index("ix_replays_draft", "replays")
    op.drop_index("ix_retrains_draft", "retrains")
    op.execute("DELETE FROM retrains WHERE cell_id IS NULL")
    with op.batch_alter_table("retrains") as retrains:
        for name in ("model", "draft", "decision", "trained_on", "token_sha256"):
            retrains.drop_column(name)
        retrains.alter_column("cell_id", existing_type=ID, nullable=False)
