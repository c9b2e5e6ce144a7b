"""The other tests: their state, what a replay knows beyond weights, answers to canary prompts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("replays", sa.Column("figures", JSON, nullable=True))
    op.create_table(
        "monitors",
        sa.Column("id", ID, nullable=False),
        sa.Column("deployment_id", ID, nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("channel", sa.String(length=8), nullable=False),
        sa.Column("state", JSON, nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployments.id"], name="fk_monitors_deployment_id_deployments"),
        sa.PrimaryKeyConstraint("id", name="pk_monitors"),
        sa.UniqueConstraint(
            "deployment_id",
            "draft",
            "fingerprint",
            "segment",
            "kind",
            name="uq_monitors_deployment_id_draft_fingerprint_segment_kind",
        ),
    )
    op.create_table(
        "canaries",
        sa.Column("id", ID, nullable=False),
        sa.Column("deployment_id", ID, nullable=False),
        sa.Column("prompts", sa.String(length=64), nullable=False),
        sa.Column("reference", JSON, nullable=False),
        sa.Column("reference_at", sa.Double(), nullable=False),
        sa.Column("state", JSON, nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployments.id"], name="fk_canaries_deployment_id_deployments"),
        sa.PrimaryKeyConstraint("id", name="pk_canaries"),
        sa.UniqueConstraint("deployment_id", "prompts", name="uq_canaries_deployment_id_prompts"),
    )


def downgrade() -> None:
    op.drop_table("canaries")
    op.drop_table("monitors")
    op.drop_column("replays", "figures")
