"""How often each delivery was given up: sending it again takes none of that back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("outbox") as outbox:
        outbox.add_column(sa.Column("given_up", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE outbox SET given_up = 1 WHERE state = 'dead'")


def downgrade() -> None:
    with op.batch_alter_table("outbox") as outbox:
        outbox.drop_column("given_up")
