"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.cli.options import prefer_argument


@pytest.mark.parametrize("kind", [str, Path])  # typer 0.27 hands out what was typed, later versions a path
@pytest.mark.parametrize("folder", [True, False])
def test_repository_of_the_environment_gives_way_to_a_folder_named_as_argument(
    tmp_path: Path, kind: type[str | Path], folder: bool
) -> None:
    named = tmp_path if folder else tmp_path / "settings.toml"
    context: Any = SimpleNamespace(
        params={"settings": kind(named)}, get_parameter_source=lambda name: SimpleNamespace(name="ENVIRONMENT")
    )
    assert prefer_argument(context, Path("elsewhere")) == (None if folder else Path("elsewhere"))
