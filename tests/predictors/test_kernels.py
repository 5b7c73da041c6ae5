from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import Load, kernels
from cotenant.predictors.features import Scale, feature_table
from cotenant.predictors.fitting import from_json, to_json
from cotenant.predictors.kernels import ColocatedRun, KernelPredictor
from cotenant.predictors.samples import Sample


def profile(model: str, threads: float, busy: float, *, latency: float = 0.01) -> Profile:
    points = [
        Point(
            share=1000,
            batch=batch,
            latency=latency * batch,
            memory=1 << 20,
            features={"threads": threads * batch, "busy_pct": busy},
        )
        for batch in (1, 4)
    ]
    return Profile(model, "gpu", points)


PROFILES = {(each.model, "gpu"): each for each in (profile("a", 10, 20), profile("b", 30, 60), profile("c", 50, 40))}
LOADS = [Load(model, "gpu", batch, 1000) for model in "abc" for batch in (1, 4)]


def truth(victim: Load, colocated: Sequence[Load]) -> float:
    """Return a slowdown that is exponential in the threads of all loads, as the model assumes."""
    threads = sum({"a": 10, "b": 30, "c": 50}[load.model] * load.batch for load in (victim, *colocated))
    return float(np.exp(0.001 * threads + 0.001 * {"a": 20, "b": 60, "c": 40}[victim.model]))


def samples() -> list[Sample]:
    return [Sample(victim, (beside,), 0.01, 0.01 * truth(victim, [beside])) for victim in LOADS for beside in LOADS]


def test_feature_table_together_sums_features_and_averages_percentages() -> None:
    known = feature_table(PROFILES, PROFILES)
    assert known.names == ("share_pct", "busy_pct", "threads", "rows_per_s", "memory_mib")
    pair = [Load("a", "gpu", 1, 1000), Load("b", "gpu", 4, 500)]
    assert known.of(pair[1]).tolist() == [50.0, 60.0, 120.0, 100.0, 1.0]
    assert known.together(pair).tolist() == [75.0, 40.0, 130.0, 200.0, 2.0]
    assert known.of(Load("a", "gpu", 3, 1000)).tolist() == known.of(Load("a", "gpu", 4, 1000)).tolist()


def test_kernels_fit_to_generated_samples_recovers_slowdowns_and_round_trips() -> None:
    fitted = kernels.fit(samples(), PROFILES)
    _, again = from_json(to_json("kernels", fitted), "it.json")
    for victim in LOADS:
        for beside in LOADS:
            assert fitted.slowdown(victim, [beside]) == pytest.approx(truth(victim, [beside]))
            assert again.slowdown(victim, [beside]) == fitted.slowdown(victim, [beside])
    assert fitted.slowdown(LOADS[0], []) == 1.0


def test_kernels_slowdown_is_at_least_1() -> None:
    faster = [Sample(each.victim, each.colocated, each.alone, each.alone * 0.9) for each in samples()]
    assert kernels.fit(faster, PROFILES).slowdown(LOADS[0], [LOADS[1]]) == 1.0


def test_scale_beyond_sampled_range_clips_features() -> None:
    fitted = kernels.fit(samples(), PROFILES)
    huge = fitted.with_profiles({**PROFILES, ("h", "gpu"): profile("h", 1e6, 60)})
    beside, most = Load("h", "gpu", 1, 1000), Load("c", "gpu", 4, 1000)
    assert huge.slowdown(LOADS[0], [beside]) <= fitted.slowdown(LOADS[0], [most]) * fitted.slowdown(most, [most])


def test_scale_of_constant_feature_drops_it() -> None:
    rows = np.array([[1.0, 5.0], [3.0, 5.0]])
    scale = Scale.of(rows, ["threads", "busy"])
    assert scale.apply(rows).tolist() == [[-1.0], [1.0]]
    assert [column.name for column in scale.columns] == ["threads"]
    assert Scale.of(rows[:1], ["threads", "busy"]).apply(rows).shape == (2, 0)


def test_kernels_with_profiles_predicts_unsampled_models() -> None:
    fitted = kernels.fit(samples(), PROFILES)
    stranger = Load("d", "gpu", 1, 1000)
    with pytest.raises(PlanError, match="model 'd' on 'gpu' has no features"):
        fitted.slowdown(stranger, [LOADS[0]])
    wider = fitted.with_profiles({**PROFILES, ("d", "gpu"): profile("d", 30, 60)})
    assert isinstance(wider, KernelPredictor)
    assert wider.slowdown(stranger, [LOADS[0]]) == fitted.slowdown(Load("b", "gpu", 1, 1000), [LOADS[0]])


def test_kernels_fit_to_too_few_samples_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="3 samples are too few for 'lr'"):
        kernels.fit(samples()[::12], PROFILES)
    with pytest.raises(PlanError, match="no co-located runs"):
        kernels.fit_sum([], PROFILES)


def test_fit_sum_of_larger_sets_predicts_total_throughput() -> None:
    threads = {"a": 10, "b": 30, "c": 50}
    for count in (2, 3, 4):
        rng = np.random.default_rng(count)
        sets = [tuple(LOADS[i] for i in rng.integers(0, len(LOADS), count)) for _ in range(60)]
        asked = [sum(threads[load.model] * load.batch for load in loads) for loads in sets]
        runs = [
            ColocatedRun(loads, (100 - 0.01 * all_of_them,) * count)
            for loads, all_of_them in zip(sets, asked, strict=True)
        ]
        found = kernels.fit_sum(runs, PROFILES).rows_per_s(sets)
        assert found == pytest.approx([sum(run.rows_per_s) for run in runs])


def test_runs_of_samples_combines_victims_of_one_run() -> None:
    a, b, c = (Load(model, "gpu", 1, 1000) for model in "abc")
    found = kernels.runs_of(
        [
            Sample(a, (b,), 1.0, 2.0),
            Sample(b, (a,), 1.0, 4.0),
            Sample(b, (a,), 1.0, 4.0),
            Sample(c, (a,), 1.0, 2.0),  # a beside c was not measured
            Sample(c, (c,), 1.0, 2.0),
        ]
    )
    assert found == [ColocatedRun((a, b), (0.5, 0.25)), ColocatedRun((c, c), (0.5, 0.5))]
