"""`cotenant profile`, with few points."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from cotenant.config import read_profiles_file
from cotenant.profiling.grid import Grid
from tests.cli.program import INTERRUPT, PATIENCE, Program, alive, started, until, workers_of


@pytest.fixture(autouse=True)
def repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`identity` under two names, and `broken`."""
    monkeypatch.setattr("cotenant.cli.prepare.Grid", partial(Grid, shares=(1000, 500), batches=(1, 2), seconds=0.01))
    for name, model in (("first", "identity"), ("second", "identity"), ("broken", "broken")):
        shutil.copytree(folder / "models" / model, folder / "mine" / name)
    return folder / "mine"


def test_what_was_measured_is_written_down_and_kept(program: Program, folder: Path) -> None:
    said = program("profile", "--repository", "mine", "--output", "mine.csv")
    assert (said.code, said.out) == (0, "")
    words = " ".join(said.err.split())
    assert (
        "profiling first" in words
        and "broken: mine/broken/1/model.onnx: no model" in words
        and "wrote mine.csv" in words
    )
    written = read_profiles_file(folder / "mine.csv")
    assert set(written) == {("first", "cpu"), ("second", "cpu")}

    again = program("profile", "--repository", "mine", "--json")
    assert "profiling" not in again.err
    assert [each["model"] for each in json.loads(again.out)] == ["first", "second"]
    table = program("profile", "--repository", "mine", "--plot", "mine.svg")
    assert "first" in table.out and (folder / "mine.svg").stat().st_size
    assert "profiling first" in program("profile", "--repository", "mine", "--again").err


def test_where_it_cannot_be_kept_is_said(program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a file, which is refused to root as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "serve.toml"))
    said = program("profile", "--repository", "mine")
    assert (said.code, said.out) == (1, "")
    assert "cannot keep the profile: Not a directory; set XDG_CACHE_HOME to a folder that can be written\n" in said.err


def test_an_interrupted_profile_leaves_nothing_behind(folder: Path) -> None:
    process = started(folder, "profile", "--repository", "mine")
    workers: list[int] = []

    def measuring() -> bool:
        assert process.poll() is None, process.communicate()
        workers[:] = workers_of(process.pid)
        return bool(workers)

    until(measuring)
    process.send_signal(INTERRUPT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert (out, "Traceback" in err) == ("", False)
    until(lambda: not any(alive(pid) for pid in workers))
