"""Our predictor on others' measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cotenant.core.profile import Profiles
from cotenant.predictors import Interference, Load
from cotenant.predictors.kernels import Run
from cotenant.predictors.ours import fit
from cotenant.profiling.judging import judged
from experiments.data import a100, kace, v100
from experiments.kace import protocol
from tests.experiments.data import needs_data


def rows_per_s(run: Run, interference: Interference, profiles: Profiles) -> float:
    def alone(load: Load) -> float:
        return load.batch / profiles[load.model, load.kind].latency(load.batch, load.share)

    loads = run.loads
    return sum(alone(load) / interference.slowdown(load, (*loads[:i], *loads[i + 1 :])) for i, load in enumerate(loads))


@needs_data
def test_on_kaces_splits_it_comes_near_to_who_knows_all() -> None:
    """KACE's own line comes to 0.906 of it as published, and to 0.927 at best."""
    profiles = kace.profiles()
    found = []
    for seed in kace.SEEDS:
        train, test = kace.split(3, seed)
        ours = fit(kace.samples(train), profiles).asking(0.5)

        def policy(runs: Sequence[Run], ours: Interference = ours) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array([rows_per_s(run, ours, profiles) for run in runs])

        found.append(protocol.mean(protocol.relative(test, policy)))
    assert np.mean(found) >= 0.94


@needs_data
@pytest.mark.slow
def test_on_pairs_that_were_held_back() -> None:
    """The median within 3 % in nine of ten on a V100; on an A100, whose latencies jump, nearly 8; new victims within a
    quarter. Quantiles cover what they say within 3 points."""
    random, new = judged(["ours"], v100.pairs(), v100.profiles(), repeats=3)
    assert random.p90 is not None and random.p90 <= 3
    assert new.p90 is not None and new.p90 <= 20
    assert random.coverage == pytest.approx(90, abs=3)
    random, new = judged(["ours"], a100.pairs(), a100.profiles(), repeats=3)
    assert random.p90 is not None and random.p90 <= 10
    assert new.p90 is not None and new.p90 <= 25
    assert random.coverage == pytest.approx(90, abs=3)
