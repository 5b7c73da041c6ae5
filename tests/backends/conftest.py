from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """What has happened to the fake driver's GPUs; see tests/driver/build.py."""
    return tmp_path / "state"
