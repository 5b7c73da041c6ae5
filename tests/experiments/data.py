"""Tests of experiments need what others measured; where that is absent they are skipped."""

from __future__ import annotations

import pytest

from cotenant.published import FOLDER

needs_data = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"needs the measurements of others at {FOLDER}, which do not come along"
)
