from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.profile import Point, Profile
from cotenant.render.profiles import profile_table, save_profiles
from tests.render.plans import cells


def profile(model: str) -> Profile:
    return Profile(
        model, "cpu", [Point(share=s, batch=b, latency=0.01 * b, memory=1) for s in (200, 400) for b in (1, 4)]
    )


def test_profile_table_and_figure_show_every_point(tmp_path: Path) -> None:
    assert ["20 %", "10 ms", "40 ms"] in cells(profile_table(profile("a")))
    pytest.importorskip("matplotlib")
    path = tmp_path / "profiles.svg"
    save_profiles([profile(model) for model in "abcd"], path)
    assert path.read_text().count("<!-- latency, ms -->") == 4
    assert path.read_text().count("<!-- share -->") == 1
