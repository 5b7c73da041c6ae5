"""`cotenant profile`, with few points."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from cotenant.config import read_profiles_file
from cotenant.predictors.samples import read_samples
from cotenant.profiling.grid import Grid
from cotenant.profiling.pairs import measure_pairs
from tests.cli.program import INTERRUPT, PATIENCE, Program, alive, started, until, workers_of


@pytest.fixture(autouse=True)
def repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`identity` under two names, and `broken`."""
    few = Grid(shares=(1000, 500), batches=(1, 2), seconds=0.01)
    monkeypatch.setattr("cotenant.app.profile_source.grid_of", lambda kind: few)
    for place in ("app.deployment_builder.plan_problem", "planning.plan"):
        monkeypatch.setattr(f"cotenant.{place}", lambda *_: pytest.fail("nobody asked for a plan"))
    for name, model in (("first", "identity"), ("second", "identity"), ("broken", "broken")):
        shutil.copytree(folder / "models" / model, folder / "mine" / name)
    return folder / "mine"


def test_profile_writes_and_caches_what_it_measured(program: Program, folder: Path) -> None:
    said = program("profile", "--model-repository", "mine", "--output", "mine.csv")
    assert (said.code, said.out) == (0, "")
    words = " ".join(said.err.split())
    assert (
        "profiling first" in words
        and "broken: mine/broken/1/model.onnx: no ONNX model" in words
        and "wrote mine.csv" in words
    )
    written = read_profiles_file(folder / "mine.csv")
    assert set(written) == {("first", "cpu"), ("second", "cpu")}

    again = program("profile", "--model-repository", "mine", "--json")
    assert "profiling" not in again.err
    assert [each["model"] for each in json.loads(again.out)] == ["first", "second"]
    table = program("profile", "--model-repository", "mine", "--plot", "mine.svg")
    assert "first" in table.out and (folder / "mine.svg").stat().st_size
    assert program("profile", "--model-repository", "mine", "--report", "mine.html").code == 0
    page = (folder / "mine.html").read_text()
    assert "first on cpu: up to " in page and "<h2>Configurations, ranked</h2>" in page and "second,cpu,50,1," in page
    assert "profiling first" in program("profile", "--model-repository", "mine", "--force").err


def test_report_of_profiles_from_a_busy_machine_says_so(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.profiling.grid.ForeignLoad.read", lambda self, now: 0.5)
    said = program("profile", "--model-repository", "mine", "--force", "--report", "busy.html")
    told = "other programs used 50 % of the processors while first was profiled"
    assert f"busy machine: {told}" in said.err
    text = (folder / "busy.html").read_text()
    assert f"Measure again on a quiet machine: {told}." in text and "Profiles of 2 models" in text


def test_profile_pairs_continues_an_existing_file(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a file that is gone on with, and that a predictor can be fitted to. On a busy machine a batch may take
    longer alone than beside another, which is no matter here."""
    for module in ("profiling.pairs", "predictors.samples"):
        monkeypatch.setattr(f"cotenant.{module}.MIN_TIME_RATIO", 0.001)
    monkeypatch.setattr("cotenant.predictors.fitting.MAX_PROFILE_RATIO", 1e6)
    monkeypatch.setattr("cotenant.cli.pairs.measure_pairs", partial(measure_pairs, seconds=0.02))
    said = program("profile", "-r", "mine", "--output", "mine.csv", "--pairs", "pairs.csv", "--count", "3")
    assert said.code == 0, said.err
    assert "6 samples in pairs.csv" in said.err
    first = (folder / "pairs.csv").read_text()
    again = program("profile", "--model-repository", "mine", "--pairs", "pairs.csv", "--count", "5")
    assert again.code == 0 and "pairs.csv has 3 of 5 runs" in again.err
    assert (folder / "pairs.csv").read_text().startswith(first)
    samples = read_samples((folder / "pairs.csv").read_text().splitlines(), "pairs.csv")
    runs = {frozenset((it.victim, *it.colocated)) for it in samples}
    assert (len(samples), len(runs)) == (10, 5)
    fitted = program("fit", "pairs.csv", "--profiles", "mine.csv", "--json")
    assert fitted.code == 0, fitted.err
    assert "add --pairs" in program.refuses("profile", "--model-repository", "mine", "--count", "3")


def test_profile_pairs_into_another_file_is_rejected(program: Program, folder: Path) -> None:
    """Said before anything is measured."""
    (folder / "notes.csv").write_text("what,when\n")
    said = program.refuses("profile", "--model-repository", "absent", "--pairs", "notes.csv")
    assert "notes.csv:1: column 'kind' is missing; samples of pairs have" in said
    said = program.refuses("profile", "--model-repository", "absent", "--output", "a.csv", "--pairs", "a.csv")
    assert "--output and --pairs are both 'a.csv'; profiles and samples need a file each" in said


def test_profile_without_a_writable_cache_says_so(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file, which is refused to root as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "serve.toml"))
    said = program("profile", "--model-repository", "mine")
    assert (said.code, said.out) == (1, "")
    assert "cannot keep the profile: Not a directory; set XDG_CACHE_HOME to a folder that can be written\n" in said.err


def test_profile_interrupted_leaves_no_worker(folder: Path) -> None:
    process = started(folder, "profile", "--model-repository", "mine")
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
