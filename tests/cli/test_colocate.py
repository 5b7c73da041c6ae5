"""`cotenant colocate`: what it chooses by each policy, and how it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.predictors import Load
from cotenant.predictors.fitting import fit, to_json
from cotenant.predictors.samples import Sample, write_samples
from tests.cli.program import Program

THREADS = {"a": 10.0, "b": 30.0, "c": 20.0, "d": 45.0, "e": 5.0}
RATES = {"a": 100.0, "b": 400.0, "c": 50.0, "d": 800.0, "e": 20.0}
PROFILES = {
    (model, "gpu"): Profile(
        model,
        "gpu",
        [
            Point(
                share=1000,
                batch=batch,
                latency=batch / RATES[model],
                memory=int(threads) << 28,
                features={"threads": threads * batch, "sm_util_pct": 2 * threads + batch},
            )
            for batch in (2, 8)
        ],
    )
    for model, threads in THREADS.items()
}
LOADS = [Load(model, "gpu", batch, 1000) for model in THREADS for batch in (2, 8)]


def samples() -> list[Sample]:
    """Threads of the neighbour slow."""
    return [
        Sample(
            victim,
            (beside,),
            victim.batch / RATES[victim.model],
            victim.batch / RATES[victim.model] * (1.0 + 0.002 * THREADS[beside.model] * beside.batch),
        )
        for victim, beside in itertools.product(LOADS, LOADS)
    ]


@pytest.fixture
def files(folder: Path) -> Path:
    (folder / "profiles.csv").write_text(write_profiles(PROFILES.values()))
    (folder / "samples.csv").write_text(write_samples(samples()))
    (folder / "fitted.json").write_bytes(to_json("kernels", fit("kernels", samples(), PROFILES)))
    return folder


ASK = ("colocate", "a:8", "--candidates", "b:8,c,d:2,e:8", "--profiles", "profiles.csv")


@pytest.mark.usefixtures("files")
def test_colocate_by_each_policy_chooses(program: Program) -> None:
    def first(*flags: str) -> str:
        said = program(*ASK, *flags, "--json")
        assert said.code == 0, said.err
        found: str = json.loads(said.out)[0]["colocated"][0]
        return found

    assert first() == "e:8@100%"  # the least memory
    assert first("--policy", "sm") == "d:2@100%"
    assert first("--samples", "samples.csv") == "d:2@100%"
    assert first("--samples", "samples.csv", "--policy", "oracle") == "d:2@100%"
    assert first("--fit", "fitted.json") == "d:2@100%"
    assert first("--fit", "fitted.json", "--by", "relative") == "e:8@100%"
    assert first("--policy", "random", "--seed", "3") in ("b:8@100%", "c:8@100%", "d:2@100%", "e:8@100%")


def test_colocate_with_an_unseen_victim_names_it(program: Program, files: Path) -> None:
    known = [sample for sample in samples() if sample.victim.model != "d"]
    (files / "ours.json").write_bytes(to_json("gaussian-process", fit("gaussian-process", known, PROFILES)))
    said = program(*ASK, "--fit", "ours.json")
    assert said.code == 0
    assert [line for line in said.err.splitlines() if line.startswith("extrapolated:")] == [
        "extrapolated: interference on d: it is the victim in no sample"
    ]


@pytest.mark.usefixtures("files")
def test_colocate_with_samples_shows_measured_throughput(program: Program) -> None:
    (best, *_) = json.loads(program(*ASK, "--samples", "samples.csv", "--policy", "memcap", "--json").out)
    measured = 100 / (1 + 0.002 * 40) + 20 / (1 + 0.002 * 80)
    assert best["measured"] == pytest.approx(measured, rel=1e-3)
    assert best["of_best"] == pytest.approx(measured / (100 / (1 + 0.002 * 90) + 800 / (1 + 0.002 * 80)), rel=1e-3)


@pytest.mark.usefixtures("files")
def test_colocate_compare_shows_every_policy(program: Program) -> None:
    said = program(*ASK, "--samples", "samples.csv", "--fit", "fitted.json", "--compare")
    assert said.code == 0
    assert "left out: mem: the rule 'mem' needs the column 'dram_util_pct'" in said.err
    policies = [line.split()[0] for line in said.out.splitlines() if "@100%" in line][1:]
    assert policies == ["oracle", "predicted", "kace", "memcap", "sm", "random", "best"]
    assert "100.0 %" in said.out


@pytest.mark.usefixtures("files")
def test_colocate_several_models_chooses_sets(program: Program) -> None:
    said = program(*ASK, "--fit", "fitted.json", "--count", "3", "--json")
    found = json.loads(said.out)
    assert len(found) == 4
    assert all(len(each["colocated"]) == 3 for each in found)
    few = program(*ASK, "--count", "2", "--memory", "12GiB", "--json")
    assert all("d:2@100%" not in each["colocated"] for each in json.loads(few.out))


@pytest.mark.usefixtures("files")
def test_colocate_with_wrong_options_says_why(program: Program) -> None:
    def refused(*arguments: str) -> str:
        return program.refuses("colocate", *arguments, "--profiles", "profiles.csv")

    assert refused("x", "-c", "a") == "model 'x' has no profile; available: a, b, c, d, e"
    assert refused("a:9", "-c", "b") == "'a:9': a batch of 9 is not one from 1 to 8, as measured"
    assert refused("a@50", "-c", "b") == "'a@50': a share must be between 100 and 100 %"
    assert refused("a:b:c", "-c", "b").startswith("'a:b:c' is not MODEL[:BATCH][@SHARE%]")
    assert refused("a", "-c", "b", "--count", "2") == "--candidates: 1 are fewer than the 2 of --count"
    assert refused("a", "-c", "b", "--policy", "best") == (
        "--policy: 'best' is unknown; available: predicted, kace, memcap, sm, mem, random, oracle"
    )
    assert refused("a", "-c", "b", "--policy", "predicted") == "--policy predicted needs --fit"
    assert refused("a", "-c", "b", "--policy", "oracle") == "--policy oracle needs --samples"
    assert refused("a", "-c", "b", "--kind", "cpu") == "--kind: profiles.csv has no profile on 'cpu'; it has gpu"
    assert refused("a", "-c", "b", "--by", "power") == "--by: 'power' is unknown; use rows or relative"
    assert "1 candidates fit next to 'a' within 1 GiB" in refused("a", "-c", "b", "--memory", "1GiB")
