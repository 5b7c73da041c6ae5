from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cotenant.app.settings import RELOADABLE, check_reloadable, settings_from
from cotenant.config import read_settings
from cotenant.errors import ConfigError


def test_settings_of_nothing_are_the_defaults() -> None:
    assert settings_from(None) == read_settings()


def test_settings_of_a_file_are_those_in_it(folder: Path) -> None:
    known = read_settings("serve.toml")
    assert settings_from("serve.toml") == settings_from(Path("serve.toml")) == settings_from(known) == known


def test_settings_of_a_folder_are_the_defaults_with_that_repository_and_free_ports(folder: Path) -> None:
    settings = settings_from("models")
    assert settings.model_repository == Path("models")
    assert {settings.http_port, settings.grpc_port, settings.metrics_port} == {0}


def test_settings_missing_path_is_rejected_with_its_name() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        settings_from("nowhere")


def test_check_reloadable_accepts_models_and_names_what_is_fixed(folder: Path) -> None:
    current = read_settings("serve.toml")
    check_reloadable(current, msgspec.structs.replace(current, planner="elastic", models=()))
    with pytest.raises(
        ConfigError, match=r"cannot change while the server runs: warm_workers, grace; restart the server"
    ):
        check_reloadable(current, msgspec.structs.replace(current, warm_workers=7, grace=1.5, planner="elastic"))


def test_guide_names_what_a_reload_may_change() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    paragraph = guide.partition("## Reload the configuration")[2].partition(" may change;")[0]
    named = set(re.findall(r"`\[*(\w+)\]*`", paragraph.rpartition("request.")[2]))
    assert named == RELOADABLE
