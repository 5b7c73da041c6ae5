from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import Program
from tests.live.deployment import csv, repository

PROBLEM = """
profiles = ["profiles.csv"]

[[models]]
name = "identity"
slo = "100ms"
rate = 100

[[models]]
name = "lookup"
slo = "200ms"
rate = 50

[[devices]]
kind = "cpu"
count = 1
cuts = [20, 40, 60, 80, 100]
"""
SERVE = """
model_repository = "models"
profiles = "profiles.csv"
grace = "5s"
http_port = 0
grpc_port = 0
metrics_port = 0

[[models]]
name = "identity"
slo = "2s"
rate = 20

[[models]]
name = "lookup"
slo = "2s"
rate = 10
"""
# `lookup` takes rows of any length; this says which are usual.
WARM_UP = 'model_warmup { inputs { key: "x" value { dims: [2] zero_data: true } } }\n'


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = repository(tmp_path_factory.mktemp("repository"))
    (root / "lookup" / "config.pbtxt").write_text(WARM_UP)
    return root


def fill(folder: Path, models: Path) -> None:
    """Put models, their profiles, a problem and settings there."""
    (folder / "models").symlink_to(models)
    (folder / "profiles.csv").write_text(csv())
    (folder / "problem.toml").write_text(PROBLEM)
    (folder / "serve.toml").write_text(SERVE)


@pytest.fixture
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models of known latency, a problem and settings. Nothing needs to be measured."""
    fill(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture
def program(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(capsys, monkeypatch)
