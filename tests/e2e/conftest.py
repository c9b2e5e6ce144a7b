from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """One machine; whatever still runs on it is stopped at the end."""
    one = Machine(tmp_path)
    yield one
    one.stop()
