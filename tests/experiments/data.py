"""Tests of experiments need what others measured; where that is absent they are skipped."""

from __future__ import annotations

import pytest

from experiments import data

needs_data = pytest.mark.skipif(
    not data.FOLDER.is_dir(), reason=f"needs the measurements of others at {data.FOLDER}, which do not come along"
)
