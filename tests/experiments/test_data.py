"""Readers of others' measurements: units, and figures that the files' own notes and papers give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cotenant import published
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.predictors.linear import DRAM, L2, fit
from cotenant.predictors.samples import Sample
from cotenant.published import a100, v100
from experiments.data import glet
from tests.experiments.data import needs_data


@needs_data
def test_a100_throughputs_equal_those_of_parvagpu() -> None:
    """ParvaGPU's tables for seven slices of an A100-80GB: 2,396.4 and 1,447.2 requests/s at a batch of 32."""
    profiles = a100.profiles()
    assert len(profiles) == 10
    for model, rate in (("resnet50", 2396.4), ("vgg19", 1447.2)):
        profile = profiles[model, a100.KIND]
        assert 32 / profile.latency(32, WHOLE) == pytest.approx(rate, rel=5e-4)
        assert profile.shares == (200, 400, 500, 600, 800, WHOLE)
        assert profile.max_batch == 64
    assert profiles["resnet50", a100.KIND].features(32, 500) == {L2: 17.48, DRAM: 22.07}


@needs_data
def test_a100_matched_omits_samples_of_older_runs() -> None:
    """Small batches of vgg19, which look slowed by a quarter or more by anybody."""
    every, matched = a100.pairs(), set(a100.matched())
    left_out = [sample for sample in every if sample not in matched]
    assert (len(every), len(left_out)) == (1817, 351)
    assert {(it.victim.model, it.victim.batch) for it in left_out} == {("vgg19", batch) for batch in (1, 2, 4, 8)}
    assert min(it.slowdown for it in left_out) > 1.25


@needs_data
def test_a100_pairs_have_the_documented_mean_and_median_slowdown() -> None:
    slowdowns = [sample.slowdown for sample in a100.pairs()]
    assert len(slowdowns) == 1817
    assert np.mean(slowdowns) == pytest.approx(1.34, abs=0.01)
    assert np.median(slowdowns) == pytest.approx(1.314, abs=0.001)


@needs_data
def test_v100_profiles_have_latencies_only_where_measured() -> None:
    profiles = v100.profiles()
    assert [model for model, _ in profiles] == ["alexnet", "resnet50", "vgg19", "ssd"]
    resnet50 = profiles["resnet50", v100.KIND]
    assert resnet50.latency(1, 200) == pytest.approx(4.258e-3, rel=1e-3)
    assert resnet50.latency(32, WHOLE) == resnet50.latency(32, 800)
    assert resnet50.latency(2, 100) == float("inf")
    assert L2 in resnet50.features(32, 500)


@needs_data
def test_v100_pairs_have_the_slowdowns_that_gpulet_reports() -> None:
    """gpulet, Figure 7: 90 % of pairs are slowed by less than 18 %."""
    slowdowns = [sample.slowdown for sample in v100.pairs()]
    assert len(slowdowns) == 2 * 750
    assert np.percentile(slowdowns, 50) == pytest.approx(1.091, abs=0.001)
    assert np.percentile(slowdowns, 90) < 1.18


@needs_data
@pytest.mark.parametrize(
    ("profiles", "samples", "mean_error"),
    [(v100.profiles, v100.pairs, 0.03), (a100.profiles, a100.pairs, 0.14)],
    ids=["v100", "a100"],
)
def test_linear_formula_fits_one_device_and_not_the_other(profiles, samples, mean_error) -> None:  # type: ignore[no-untyped-def]
    """Section 4.4's formula: the error is 2.8 % on average on a V100, and 12.8 % on an A100, where it learns little."""
    pairs: list[Sample] = samples()
    linear = fit(pairs, profiles())
    errors = [abs(linear.slowdown(pair.victim, pair.colocated) / pair.slowdown - 1) for pair in pairs]
    assert mean_error / 2 < np.mean(errors) < mean_error


@needs_data
def test_glet_files_give_memory_utilisation_and_coefficients() -> None:
    assert glet.memory()["vgg16"] == 2_920_000_000
    assert glet.utilisation()["bert"][4].l2 == pytest.approx(0.14006, abs=1e-5)
    assert glet.coefficients().constant == pytest.approx(0.89537, abs=1e-5)


@needs_data
def test_synthetic_latencies_have_their_documented_scale() -> None:
    """At 0.8 a batch of 32 on the whole device takes 0.8 of half the target: 108 ms for resnet50."""
    profiles = glet.synthetic(8)
    assert len(profiles) == 9
    assert profiles["resnet50", glet.KIND].latency(32, WHOLE) == pytest.approx(0.8 * 0.054)
    assert profiles["resnet50", glet.KIND].memory(1) == 1_820_000_000
    assert glet.synthetic(2)["resnet50", glet.KIND].latency(32, WHOLE) == pytest.approx(0.2 * 0.054)


def test_lines_of_a_missing_data_set_say_where_to_put_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    for read, owner in ((a100.profiles, "0909wlgur/Gpulet"), (v100.pairs, "icloud-ecnu/igniter")):
        with pytest.raises(ConfigError) as error:
            read()
        assert str(tmp_path) in str(error.value)
        assert owner in str(error.value)


@pytest.mark.parametrize("text", ["resnet50,1,20", "resnet50,1,20,mem_util,much,l2_util,2,0"])
def test_lines_of_a_corrupt_file_name_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    folder = tmp_path / a100.SOURCE
    folder.mkdir(parents=True)
    (folder / "mem_util.csv").write_text(f"resnet50,1,40,mem_util,1,l2_util,2,0\n{text}\n")
    with pytest.raises(ConfigError, match=r"mem_util\.csv:2: "):
        a100.profiles()


def test_alone_latencies_are_those_measured() -> None:
    from cotenant.core.profile import Point
    from cotenant.predictors import Load

    faster = [Point(share=WHOLE, batch=batch, latency=1 / batch, memory=0) for batch in (1, 2)]
    profile = Profile("m", "gpu", faster)
    assert published.alone([profile]) == {Load("m", "gpu", 1, WHOLE): 1.0, Load("m", "gpu", 2, WHOLE): 0.5}
    assert profile.latency(2, WHOLE) == 1.0  # monotone
