"""Our predictor on others' measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError
from cotenant.predictors import Interference, Load
from cotenant.predictors.gaussian_process import GaussianProcess, fit
from cotenant.predictors.kernels import ColocatedRun
from cotenant.predictors.samples import Sample
from cotenant.profiling.cross_validation import cross_validate
from cotenant.published import FOLDER, a100, kace, v100
from experiments.gaussian_process import table1, table2
from experiments.kace import protocol
from experiments.kace.protocol import Values
from experiments.parallel import Options
from tests.experiments.data import needs_data


def rows_per_s(run: ColocatedRun, interference: Interference, profiles: Profiles) -> float:
    def alone(load: Load) -> float:
        return load.batch / profiles[load.model, load.kind].latency(load.batch, load.share)

    loads = run.loads
    return sum(alone(load) / interference.slowdown(load, (*loads[:i], *loads[i + 1 :])) for i, load in enumerate(loads))


@pytest.mark.slow
@needs_data
def test_gaussian_process_on_kace_splits_is_close_to_oracle() -> None:
    """KACE's own line comes to 0.906 of it as published, and to 0.927 at best."""
    profiles = kace.profiles()
    found = []
    for seed in kace.SEEDS:
        train, test = kace.split(3, seed)
        ours = fit(kace.samples(train), profiles).with_quantile(0.5)

        def policy(
            runs: Sequence[ColocatedRun], ours: Interference = ours
        ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array([rows_per_s(run, ours, profiles) for run in runs])

        found.append(protocol.mean(protocol.relative(test, policy)))
    assert np.mean(found) >= 0.94


@needs_data
def test_gaussian_process_on_triples_has_the_documented_error_from_pairs_alone() -> None:
    """Half within a twelfth, a tenth beyond a third; logs that add up had 13 and 67 %, and covered 70 %."""
    errors, covered = off(fit(kace.samples(), kace.profiles()), kace.samples(kace.runs(kace.TRIPLES)))
    assert np.median(errors) <= 0.09
    assert np.quantile(errors, 0.9) <= 0.32
    assert covered == pytest.approx(0.92, abs=0.04)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_gaussian_process_on_triples_learns_from_few_measured_triples(seed: int) -> None:
    """One for six pairs, as `cotenant profile --pairs` measures them."""
    pairs, sets, profiles = kace.samples(), kace.runs(kace.TRIPLES), kace.profiles()
    order = np.random.default_rng(seed).permutation(len(sets))
    some, rest = (kace.samples([sets[i] for i in part]) for part in (order[:30], order[120:]))
    errors, covered = off(fit([*pairs, *some], profiles), rest)
    assert np.median(errors) <= 0.075
    assert np.quantile(errors, 0.9) <= 0.29
    assert covered == pytest.approx(0.92, abs=0.04)


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / kace.FOURS).is_file(), reason="needs KACE's sets of four")
def test_table_2_on_sets_of_four_has_the_documented_error(tmp_path: Path) -> None:
    """Constants were chosen without them."""
    (pairs,), (some,) = (table2.outcomes(table2.Task(("four",), measured, 0)) for measured in (0, 30))
    assert pairs.p90 <= 40
    assert some.p90 <= 25
    assert pairs.choice >= 0.99 and some.choice >= 0.99
    assert min(pairs.coverage, some.coverage) >= 87 and max(pairs.coverage, some.coverage) <= 93
    assert min(pairs.throughput, some.throughput) >= 1 - 1e-9
    table2.plot([table2.Row("four", 0, **msgspec.structs.asdict(pairs), worst=pairs.p90)], tmp_path / "rows.svg")
    with pytest.raises(ConfigError, match="--profiles five: there are three, four"):
        table2.run(Options(profiles=("five",)))


def off(ours: GaussianProcess, samples: Sequence[Sample]) -> tuple[Values, float]:
    """Sizes of the relative errors of medians, and how many slowdowns do not exceed the quantile 0.9."""
    reported = np.array([ours.quantiles(it.victim, it.colocated, (0.5, 0.9)) for it in samples])
    seen = np.array([it.slowdown for it in samples])
    return np.abs(reported[:, 0] / seen - 1), float((seen <= reported[:, 1]).mean())


@needs_data
@pytest.mark.slow
def test_table_1_without_features_has_another_error(tmp_path: Path) -> None:
    rows = [row for features in ("latencies", "+ all") for row in table1.rows_of(table1.Task("kace", features, 1, 0))]
    assert [row.features for row in rows] == ["latencies", "latencies", "+ all", "+ all"]
    (_, bare, _, features) = (row.p90 for row in rows)
    assert bare is not None and features is not None and features != bare
    table1.plot(rows, tmp_path / "rows.svg")
    assert "error of the Gaussian process by profile features" in (tmp_path / "rows.svg").read_text()
    with pytest.raises(ConfigError, match="--profiles zebra: there are v100, a100, a100-matched, kace"):
        table1.run(Options(profiles=("zebra",)))


@needs_data
@pytest.mark.slow
def test_gaussian_process_on_held_out_pairs_has_the_documented_error() -> None:
    """The median within 3 % in nine of ten on a V100; on an A100, whose latencies jump, within 8; new victims within 20
    where latencies alone are of the same runs. Quantiles cover what they say within 3 points, of each victim too."""
    random, new = cross_validate(["gaussian-process"], v100.pairs(), v100.profiles(), repeats=3)
    assert random.p90 is not None and random.p90 <= 3
    assert new.p90 is not None and new.p90 <= 20
    assert random.coverage == pytest.approx(90, abs=3)
    assert all(86.5 <= covered <= 93.5 for covered in random.coverage_of.values())
    random, new = cross_validate(["gaussian-process"], a100.pairs(), a100.profiles(), repeats=3)
    assert random.p90 is not None and random.p90 <= 8
    assert new.p90 is not None and new.p90 <= 22
    assert random.coverage == pytest.approx(90, abs=3)
    assert all(86.5 <= covered <= 93.5 for covered in random.coverage_of.values())
    assert len(random.coverage_of) == 3
    _, new = cross_validate(["gaussian-process"], a100.matched(), a100.profiles(), repeats=1)
    assert new.p90 is not None and new.p90 <= 20
