"""The stages of `make gpu-check` without a GPU: on the processor, and over the fake driver with its MPS and its ncu."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import checks, live, pairs, profiles, session
from benchmarks.gpu.__main__ import main
from cotenant.backends import Backend, Launch, nvidia
from cotenant.backends.green import Green
from cotenant.config import Settings, read_profiles_file, read_samples_file
from cotenant.core.identity import LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.live.deployment import Deployment
from cotenant.planners import Problem
from cotenant.zoo import build_models
from tests.driver import mps
from tests.driver.build import loaded

# Two batches of one kernel each, as Nsight Compute would write them.
NCU = """#!/bin/sh
for it; do case $it in --log-file=*) log=${it#*=};; esac; done
cat > "$log" <<'END'
"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum"
"","","%","ns"
"0","spin_kernel(long)","0","1,000"
"1","fprop","30","50,000"
"2","spin_kernel(long)","0","1,000"
"3","fprop","60","90,000"
END
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same stages, in seconds, for models of ONNX Runtime."""
    monkeypatch.setattr("cotenant.sim.plan_validation.MAX_REQUESTS", 1000)
    for name in ("predictors.samples", "profiling.pairs"):  # what runs for so short a time may well be held up alone
        monkeypatch.setattr(f"cotenant.{name}.MIN_TIME_RATIO", 0.0)
    for targets in (session.PAPER, session.SMALL):  # that the slowest machine keeps
        monkeypatch.setitem(targets, "lenet", session.Target(10.0))
    # A worker that need not import PyTorch starts in a tenth of the time.
    monkeypatch.setattr(session, "build_models", lambda root, names, *, torch: build_models(root, names))
    for module, values in (
        (profiles, {"SHARES": (500, 1000), "SECONDS": 0.01, "COUNTED": (1, 8)}),
        (pairs, {"COUNT": 4, "SECONDS": 0.02}),
        (
            live,
            {"COMPARED": 0.2, "STEP": 0.1, "MIN_SECONDS": 1.0, "LOADS": (0.1, 0.2), "MORE": (0.1,), "LESS": (0.05,)},
        ),
        (live, {"PLANNERS": ("elastic", "squishy")}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> Callable[..., Path]:
    """Run some stages for one model; the folder with their results."""

    def run(*words: str) -> Path:
        folders = ["--out", f"{tmp_path}/out", "--repository", f"{tmp_path}/models", "--models", "lenet"]
        monkeypatch.setattr(sys, "argv", ["gpu", *folders, *words])
        main()
        return tmp_path / "out"

    return run


def test_gpu_check_on_the_cpu_measures_profiles_and_pairs(
    check: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = check("--backend", "cpu", "--stage", "2", "3", "--seconds", "600")
    (profile,) = read_profiles_file(out / "profiles-cpu.csv").values()
    assert {(point.share, point.batch) for point in profile.points} == {
        (s, b) for s in (250, 500, 1000) for b in (1, 4)
    }
    assert len(read_samples_file(out / "pairs-cpu.csv")) == 12
    (about,) = json.loads((out / "machine.json").read_text())
    assert about["command"].endswith("--stage 2 3 --seconds 600") and about["commit"] and about["packages"]["numpy"]
    before = {path.name: path.read_bytes() for path in out.glob("*.csv")}
    out.rename(out.with_name("before"))
    check("--backend", "cpu", "--stage", "2", "3", "--known", str(out.with_name("before")))
    assert {path.name: path.read_bytes() for path in out.glob("*.csv")} == before
    assert len(json.loads((out / "machine.json").read_text())) == 2
    assert "cpu: 6 of 6 points are known" in capsys.readouterr().out


def test_gpu_check_out_of_time_names_what_is_missing(
    check: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    check("--backend", "cpu", "--stage", "2", "3", "4", "--seconds", "5.01")
    said = capsys.readouterr().out
    assert "missing: cpu: out of time; some models have nothing at 100 %, 50 %, 25 %" in said
    assert "missing: cpu: pairs of lenet need their profiles, which stage 2 measures" in said
    assert "missing: cpu: lenet cannot be planned for without the profiles of stage 2" in said
    assert said.rstrip().endswith("run again to continue")


class OnProcessor(Green):
    """Its lanes share a process, and run their models on the processor."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return msgspec.structs.replace(super().open(lane, share, leaving), cuda=False, groups=())


def test_gpu_check_all_stages_run_over_the_fake_driver(
    check: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ncu").write_text(NCU)
    (tmp_path / "bin" / "ncu").chmod(0o755)

    with ExitStack() as held:
        held.enter_context(loaded("h200"))
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mps-")))  # short: sockets are in it
        mps.installed(folder / "bin", monkeypatch)

        def create_backend(settings: Settings) -> Backend:
            # Daemons of other runs of the tests serve GPUs with other UUIDs; the fake CUDA has one alone.
            monkeypatch.setenv("COTENANT_FAKE_SALT", str(os.getpid()) if settings.backend == "mps" else "0")
            gpus = nvidia.list_gpus()
            return OnProcessor(gpus) if settings.backend == "green" else mps.OnProcessor(gpus, directory=folder)

        monkeypatch.setattr(session, "create_backend", create_backend)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        out = check("--backend", "green", "mps", "--stage", "2", "3", "4", "--seconds", "600")
    (about,) = json.loads((out / "machine.json").read_text())
    assert about["gpus"][0]["kind"] == "h200" and about["cuda"] == "13.0"
    for name in ("green", "mps"):
        (profile,) = read_profiles_file(out / f"profiles-{name}.csv").values()
        assert profile.kind == "h200" and len(profile.points) == 12
        assert all({"dram_util_pct", "power_w", "clock_mhz"} <= point.features.keys() for point in profile.points[-3:])
        assert len(read_samples_file(out / f"pairs-{name}.csv")) == 8
        found = json.loads((out / "live.json").read_text())[name]
        assert [run["load"] for run in found["agreement"]] == [0.1, 0.2]
        assert "elastic" in found["largest"] and found["temporal"]["targets_times"] in live.LOOSER
        assert all(it["plan"]["devices"] and it["runs"] for it in found["largest"].values())
    assert "all samples have the same co-located model, lenet" in capsys.readouterr().out


def test_gpu_check_tests_out_of_time_are_stopped_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "END", 0.1)
    plenty, none = (session.Session(tmp_path, tmp_path, {}, ("cpu",), seconds) for seconds in (600, 0))
    story = ["one", "=== FAILURES ===", "at length", "=== short ===", "FAILED"]
    said = ["sh", "-c", f"printf '%s\\n' {' '.join(map(repr, story))}; printf %s $WORD; exit 3"]
    lines: list[str] = []
    with (tmp_path / "checks.txt").open("w") as file:
        assert checks._followed(plenty, said, {"WORD": "two"}, lines, file) == 3
        assert (tmp_path / "checks.txt").read_text().splitlines() == [*story, "two"] == "".join(lines).splitlines()
        assert capsys.readouterr().out.splitlines() == ["one", "=== short ===", "FAILED", "two"]
        assert checks._followed(none, ["sh", "-c", "trap '' INT; sleep 600 & wait"], {}, lines, file) is None


def test_gpu_check_model_that_cannot_be_built_is_omitted(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits").mkdir()
    targets = {"digits": session.Target(1.0), "lenet": session.Target(1.0)}
    assert session.Session(tmp_path, tmp_path, targets, ("cpu",), 600.0).build().keys() == {"lenet"}
    assert "missing: digits: " in capsys.readouterr().out


def test_gpu_check_profiles_of_another_gpu_are_not_used(tmp_path: Path) -> None:
    points = [Point(share=1000, batch=1, latency=0.1, memory=1)]
    path = tmp_path / "profiles-green.csv"
    path.write_text(write_profiles([Profile("a", "a100", points), Profile("b", "h200", points)]))
    assert profiles.read(path, "h200").keys() == {"b"} and profiles.read(path).keys() == {"a", "b"}
    assert profiles.read(tmp_path / "none.csv") == {}


def test_gpu_check_without_a_gpu_names_the_alternative(check: Callable[..., Path]) -> None:
    with pytest.raises(SystemExit, match=r"no NVIDIA driver was found .*`make gpu-check BACKEND=cpu` runs the same"):
        check("--backend", "green")


@pytest.mark.slow
def test_gpu_check_targets_are_loosened_until_time_sharing_meets_them(quick: None) -> None:
    """A batch of `slow` takes longer than all the time that `quick` has."""

    def profile(name: str, seconds: float) -> Profile:
        return Profile(
            name, "h200", [Point(share=s, batch=1, latency=seconds * 1e3 / s, memory=1) for s in (500, 1000)]
        )

    models = (Model(name="quick", slo=0.005), Model(name="slow", slo=0.2))
    problem = Problem(
        models=models,
        rates={"quick": 1.0, "slow": 1.0},
        fleet=(Kind(name="h200", cuts=(500, 1000)),),
        profiles={("quick", "h200"): profile("quick", 0.001), ("slow", "h200"): profile("slow", 0.01)},
        objective="rate",
    )
    times, plan = asyncio.run(
        live._smallest_feasible_factor(Deployment(offered={}, problem=problem, plan=Plan(planner="geometry")))
    )
    assert times == 4 and plan.planner == "squishy" and not plan.unserved


def test_gpu_check_stage_leaves_time_for_later_ones(tmp_path: Path) -> None:
    it = session.Session(tmp_path, tmp_path, {}, ("cpu",), 100.0)
    it.allot(0.25)
    assert it.left == pytest.approx(25, abs=1)
    it.allot(1.0)
    assert it.left == pytest.approx(100, abs=1)
