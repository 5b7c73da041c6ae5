"""`cotenant characterise`, with short runs, up to a plan by scores from what it wrote."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cotenant.config import read_profiles_file
from cotenant.errors import ModelError
from cotenant.predictors.samples import Sample
from cotenant.profiling import pairs
from tests.cli.program import Program

SHORT = ("--duration", "0.02s")
PROBLEM = """
profiles = ["out/profiles.csv"]
interference = { model = "svd", fit = "svd.json" }
models = [{ name = "first", slo = "60s", rate = 0.1 }, { name = "second", slo = "60s", rate = 0.1 }]
devices = [{ kind = "cpu", count = 2, cuts = [25, 50, 100] }]
"""


SETTINGS = """
model_repository = "mine"
profiles = "known.csv"
models = [{ name = "first", slo = "2s" }, { name = "second", slo = "2s" }]
"""
KNOWN = "model,kind,share_pct,batch,latency_ms,memory_mib\n" + "".join(
    f"{model},cpu,{share},{batch},{batch},1\n"
    for model in ("first", "second")
    for share in (5, 100)
    for batch in (1, 8)
)


@pytest.fixture(autouse=True)
def repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`identity` under two names, whose profiles are known, and `broken`. On a busy machine a batch may take longer
    alone than beside another, or than a second before, which is no matter here."""
    (folder / "mine.toml").write_text(SETTINGS)
    (folder / "known.csv").write_text(KNOWN)
    for module in ("profiling.pairs", "predictors.samples"):
        monkeypatch.setattr(f"cotenant.{module}.MIN_TIME_RATIO", 0.001)
    monkeypatch.setattr("cotenant.predictors.fitting.MAX_PROFILE_RATIO", 1e6)
    for name, model in (("first", "identity"), ("second", "identity"), ("broken", "broken")):
        shutil.copytree(folder / "models" / model, folder / "mine" / name)


def test_characterise_fills_matrices_that_the_filter_learns_from(program: Program, folder: Path) -> None:
    said = program("characterise", "mine.toml", "-o", "out", *SHORT)
    assert said.code == 0, said.err
    assert "left out: broken:" in said.err and "wrote out/configurations.csv" in said.err
    assert "samples/s alone" in said.out and "lost co-located on cpu" in said.out
    header, *rows = csv.reader((folder / "out" / "configurations.csv").read_text().splitlines())
    assert len(header) == 1 + 3 * 4 and "cpu 50% offline" in header
    assert [row[0] for row in rows] == ["first", "second"]
    assert all(float(cell) > 0 for row in rows for name, cell in zip(header, row, strict=True) if "stream" in name)
    lost = list(csv.reader((folder / "out" / "interference-cpu.csv").read_text().splitlines()))
    assert sorted(lost[0][1:]) == ["first", "second"] and all(all(row) for row in lost[1:])
    profiles = read_profiles_file(folder / "out" / "profiles.csv")
    assert profiles["first", "cpu"].shares == (250, 500, 1000)

    fitted = program("fit", "out/pairs.csv", "--profiles", "out/profiles.csv", "--model", "svd", "-o", "svd.json")
    assert fitted.code == 0, fitted.err
    (folder / "scored.toml").write_text(PROBLEM)
    planned = program("plan", "scored.toml", "--planner", "score", "--json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    assert plan["planner"] == "score" and not plan["unserved"]


def test_characterise_goes_on_where_it_was_stopped(program: Program, folder: Path) -> None:
    first = program(
        "characterise", "mine.toml", "-o", "out", *SHORT, "--scenario", "offline", "--share", "50", "--count", "0"
    )
    assert first.code == 0, first.err
    before = (folder / "out" / "runs.csv").read_text()
    assert len(before.splitlines()) == 3 and not (folder / "out" / "pairs.csv").exists()
    again = program("characterise", "mine.toml", "-o", "out", *SHORT, "--scenario", "offline", "--count", "1", "--json")
    assert again.code == 0, again.err
    runs = json.loads(again.out)["runs"]
    assert {(each["model"], each["share"]) for each in runs} == {
        (name, share) for name in ("first", "second") for share in (1000, 500, 250)
    }
    assert (folder / "out" / "runs.csv").read_text().startswith(before)
    assert len((folder / "out" / "pairs.csv").read_text().splitlines()) == 3


def test_models_that_have_left_are_no_more_colocated_and_keep_their_runs(program: Program, folder: Path) -> None:
    offline = ("characterise", "mine.toml", "-o", "out", *SHORT, "--scenario", "offline", "--share", "50")
    assert program(*offline, "--count", "0").code == 0
    shutil.rmtree(folder / "mine" / "second")
    (folder / "mine.toml").write_text(SETTINGS.replace(', { name = "second", slo = "2s" }', ""))
    said = program(*offline)
    assert said.code == 0, said.err
    colocated = csv.DictReader((folder / "out" / "pairs.csv").read_text().splitlines())
    assert {(row["victim"], row["colocated"]) for row in colocated} == {("first", "first")}
    assert len((folder / "out" / "runs.csv").read_text().splitlines()) == 3


def test_pairs_are_left_out_where_the_scenarios_lack_offline(program: Program, folder: Path) -> None:
    common = ("characterise", "mine.toml", "-o", "out", *SHORT, "--share", "50")
    assert program(*common, "--scenario", "offline", "--count", "0").code == 0
    said = program(*common, "--scenario", "single-stream")
    assert said.code == 0, said.err
    assert not (folder / "out" / "pairs.csv").exists()


def test_pair_that_fails_is_left_out_and_the_summary_is_written(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = pairs._Bench.measure

    async def failing(bench: pairs._Bench, run: pairs.Run, seconds: float) -> list[Sample]:
        if len({load.model for load in run}) == 2:
            raise ModelError("no memory")
        return await measure(bench, run, seconds)

    monkeypatch.setattr(pairs._Bench, "measure", failing)
    said = program("characterise", "mine.toml", "-o", "out", *SHORT, "--scenario", "offline", "--share", "50")
    assert said.code == 0, said.err
    assert "left out: on cpu: 'first' co-located with 'second' cannot be measured: no memory" in said.err
    assert {path.name for path in (folder / "out").iterdir()} >= {"configurations.csv", "interference-cpu.csv"}
    found = csv.DictReader((folder / "out" / "pairs.csv").read_text().splitlines())
    assert (
        sorted((row["victim"], row["colocated"]) for row in found)
        == [("first", "first")] * 2 + [("second", "second")] * 2
    )


OFFLINE = ("characterise", "mine.toml", "-o", "out", "--scenario", "offline", "--share", "50")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that asks for it keeps what it measured, for the others."""
    return tmp_path_factory.mktemp("measured") / "out"


@pytest.fixture
def characterised(program: Program, folder: Path, measured: Path) -> None:
    """Runs of both models and their pairs are in `out`."""
    if not measured.exists():
        assert program(*OFFLINE, *SHORT).code == 0
        shutil.copytree(folder / "out", measured)
    else:
        shutil.copytree(measured, folder / "out")
    assert (folder / "out" / "pairs.csv").exists()


def change_model(folder: Path) -> None:
    (folder / "mine" / "first" / "config.pbtxt").write_text("max_batch_size: 4")


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        (("--batch", "4"), None, "its runs are of --batch 8, not 4"),
        (("--duration", "0.03s"), None, "its runs are of --duration 0.02s, not 0.03s"),
        ((), change_model, "its runs are of another file or configuration of model 'first'"),
        ((), lambda folder: (folder / "out" / "conditions.json").unlink(), "out/conditions.json: is missing"),
        ((), lambda folder: (folder / "out" / "conditions.json").write_text("[]"), "these are no conditions of"),
    ],
)
@pytest.mark.usefixtures("characterised")
def test_runs_of_other_conditions_are_not_mixed(
    program: Program, folder: Path, options: Sequence[str], change: Callable[[Path], object] | None, said: str
) -> None:
    before = (folder / "out" / "runs.csv").read_text()
    if change is not None:
        change(folder)
    refused = program(*OFFLINE, *SHORT, *options)
    assert refused.code == 1 and said in refused.err, refused.err
    assert (folder / "out" / "runs.csv").read_text() == before
    forced = program(*OFFLINE, *SHORT, *options, "--force", "--count", "0")
    assert forced.code == 0, forced.err
    assert not (folder / "out" / "pairs.csv").exists()
    assert program(*OFFLINE, *SHORT, *options, "--count", "1").code == 0
    assert (folder / "out" / "pairs.csv").exists()


def test_changed_slo_is_not_mixed_into_runs_of_the_server_scenario(program: Program, folder: Path) -> None:
    common = ("characterise", "mine.toml", "-o", "out", *SHORT, "--share", "50")
    assert program(*common, "--scenario", "offline", "--count", "0").code == 0
    (folder / "mine.toml").write_text(SETTINGS.replace("2s", "4s"))
    assert program(*common, "--scenario", "server").code == 0
    (folder / "mine.toml").write_text(SETTINGS)
    said = program(*common, "--scenario", "server")
    assert said.code == 1
    assert "its runs are of an SLO of 4 s for model 'first', not 2 s; of an SLO of 4 s for model 'second'" in said.err


def test_characterise_refuses_what_it_cannot_do_before_anything_runs(program: Program, folder: Path) -> None:
    said = program.refuses("characterise", "absent", "--scenario", "online")
    assert "--scenario online: unknown; available: single-stream, multi-stream, server, offline" in said
    said = program.refuses("characterise", "absent", "--scenario", "server", "--count", "3")
    assert "--count needs the offline scenario; add --scenario offline" in said
    (folder / "out").mkdir()
    (folder / "out" / "runs.csv").write_text("what,when\n")
    assert "out/runs.csv:1: these are no runs of `cotenant characterise`" in program.refuses(
        "characterise", "absent", "-o", "out"
    )
    (folder / "fake.toml").write_text('backend = "fake"\nmodel_repository = "mine"\n')
    said = program.refuses("characterise", "fake.toml")
    assert "the backend fake runs no models, so there is nothing to characterise" in said


def test_characterise_refuses_a_share_that_the_device_has_not(program: Program) -> None:
    said = program("characterise", "mine.toml", "--share", "33.3", *SHORT)
    assert said.code == 1
    assert "error: --share 33.3: cpu has no such share; available: 5, 10, " in said.err
