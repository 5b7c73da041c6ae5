from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="dra-") as name:
        yield Path(name)
