"""Create the tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "artefacts",
        sa.Column("id", ID, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("details", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_artefacts"),
    )
    op.create_table(
        "deployments",
        sa.Column("id", ID, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("facts", JSON, nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deployments"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", ID, nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.UniqueConstraint("event_id", "endpoint", name="uq_outbox_event_id_endpoint"),
    )
    op.create_index(
        "ix_outbox_pending",
        "outbox",
        ["due_at"],
        unique=False,
        postgresql_where=sa.text("state = 'pending'"),
        sqlite_where=sa.text("state = 'pending'"),
    )
    op.create_table(
        "outcomes",
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("segment", "outcome", "reason", name="pk_outcomes"),
    )
    op.create_table(
        "segments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_segments"),
    )
    op.create_table(
        "cells",
        sa.Column("id", ID, nullable=False),
        sa.Column("deployment_id", ID, nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("gamma", sa.Integer(), nullable=False),
        sa.Column("state", JSON, nullable=False),
        sa.Column("sums", JSON, nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployments.id"], name="fk_cells_deployment_id_deployments"),
        sa.PrimaryKeyConstraint("id", name="pk_cells"),
        sa.UniqueConstraint(
            "deployment_id", "draft", "segment", "split", name="uq_cells_deployment_id_draft_segment_split"
        ),
    )
    op.create_table(
        "samples",
        sa.Column("id", ID, nullable=False),
        sa.Column("request_id", sa.String(length=256), nullable=False),
        sa.Column("deployment_id", ID, nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("arrived_at", sa.Double(), nullable=False),
        sa.Column("served_at", sa.Double(), nullable=False),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("retokenised", sa.Boolean(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("top_p", sa.Double(), nullable=True),
        sa.Column("top_k", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("timing", JSON, nullable=True),
        sa.Column("engine", JSON, nullable=True),
        sa.Column("extra", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployments.id"], name="fk_samples_deployment_id_deployments"),
        sa.PrimaryKeyConstraint("id", name="pk_samples"),
        sa.UniqueConstraint("request_id", name="uq_samples_request_id"),
    )
    op.create_index("ix_samples_arrived_at", "samples", ["arrived_at"], unique=False)
    op.create_table(
        "cell_hours",
        sa.Column("cell_id", ID, nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("sums", JSON, nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cells.id"], name="fk_cell_hours_cell_id_cells", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("cell_id", "hour", name="pk_cell_hours"),
    )
    op.create_index("ix_cell_hours_hour", "cell_hours", ["hour"], unique=False)
    op.create_table(
        "events",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("cell_id", ID, nullable=True),
        sa.Column("deployment_id", ID, nullable=True),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("start_request_id", sa.Text(), nullable=True),
        sa.Column("details", JSON, nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cells.id"], name="fk_events_cell_id_cells", ondelete="SET NULL"),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name="fk_events_deployment_id_deployments", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_cell_id", "events", ["cell_id"], unique=False)
    op.create_index("ix_events_opened_at", "events", ["opened_at"], unique=False)
    op.create_table(
        "payloads",
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("output_ids", sa.LargeBinary(), nullable=True),
        sa.Column("text", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["sample_id"], ["samples.id"], name="fk_payloads_sample_id_samples", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sample_id", name="pk_payloads"),
    )
    op.create_index(
        "ix_payloads_text",
        "payloads",
        ["sample_id"],
        unique=False,
        postgresql_where=sa.text("text IS NOT NULL"),
        sqlite_where=sa.text("text IS NOT NULL"),
    )

    op.create_table(
        "replays",
        sa.Column("id", ID, nullable=False),
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("rule", sa.String(length=16), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("depths", sa.Integer(), nullable=False),
        sa.Column("encoding", sa.String(length=8), nullable=False),
        sa.Column("weights", sa.LargeBinary(), nullable=False),
        sa.Column("proposals", sa.LargeBinary(), nullable=True),
        sa.Column("replayed_at", sa.Double(), nullable=False),
        sa.Column("folded_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["sample_id"], ["samples.id"], name="fk_replays_sample_id_samples", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_replays"),
        sa.UniqueConstraint("sample_id", "draft", name="uq_replays_sample_id_draft"),
    )
    op.create_index(
        "ix_replays_unfolded",
        "replays",
        ["id"],
        unique=False,
        postgresql_where=sa.text("folded_at IS NULL"),
        sqlite_where=sa.text("folded_at IS NULL"),
    )
    op.create_table(
        "work",
        sa.Column("id", ID, nullable=False),
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["sample_id"], ["samples.id"], name="fk_work_sample_id_samples", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_work"),
        sa.UniqueConstraint("sample_id", "draft", name="uq_work_sample_id_draft"),
    )
    op.create_index(
        "ix_work_open",
        "work",
        ["attempts", "id"],
        unique=False,
        postgresql_where=sa.text("state IN ('pending', 'leased')"),
        sqlite_where=sa.text("state IN ('pending', 'leased')"),
    )
    op.create_table(
        "retrains",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("cell_id", ID, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("data", JSON, nullable=True),
        sa.ForeignKeyConstraint(["cell_id"], ["cells.id"], name="fk_retrains_cell_id_cells"),
        sa.ForeignKeyConstraint(["event_id"], ["events.id"], name="fk_retrains_event_id_events"),
        sa.PrimaryKeyConstraint("id", name="pk_retrains"),
        sa.UniqueConstraint("event_id", name="uq_retrains_event_id"),
    )
    op.create_index("ix_retrains_cell_id", "retrains", ["cell_id"], unique=False)


def downgrade() -> None:
    op.drop_table("retrains")
    op.drop_table("work")
    op.drop_table("replays")
    op.drop_table("payloads")
    op.drop_table("events")
    op.drop_table("cell_hours")
    op.drop_table("samples")
    op.drop_table("cells")
    op.drop_table("segments")
    op.drop_table("outcomes")
    op.drop_table("outbox")
    op.drop_table("deployments")
    op.drop_table("artefacts")
