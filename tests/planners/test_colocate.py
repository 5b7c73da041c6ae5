from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.planners import colocate
from cotenant.planners.largest_rate import ScaledInterference
from cotenant.predictors import Interference, Load
from cotenant.predictors.kernels import ColocatedRun


def profile(model: str, seconds: float, memory: int, busy: float) -> Profile:
    features = {"sm_util_pct": busy, "dram_util_pct": 100 - busy}
    return Profile(model, "gpu", [Point(share=1000, batch=8, latency=seconds, memory=memory << 30, features=features)])


PROFILES = {
    (each.model, "gpu"): each
    for each in (
        profile("target", 0.08, 4, 50),
        profile("quick", 0.01, 2, 90),
        profile("slow", 0.8, 1, 20),
        profile("mid", 0.1, 6, 60),
    )
}
TARGET, QUICK, SLOW, MID = (Load(model, "gpu", 8, 1000) for model in ("target", "quick", "slow", "mid"))


class Rude:
    """Triple the latency beside `quick`; add a tenth beside others."""

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return float(np.prod([3.0 if load.model == "quick" else 1.1 for load in colocated]))


def chosen(worth: colocate.SetScore, count: int = 1) -> list[str]:
    sets = colocate.candidate_sets(TARGET, [QUICK, SLOW, MID], count, PROFILES)
    return ["+".join(load.model for load in choice.colocated) for choice in colocate.rank_sets(sets, worth)]


def test_rank_by_prediction_orders_sets_by_total_throughput() -> None:
    """Throughputs alone are 100, 800, 10 and 80 rows/s."""
    worth = colocate.rank_by_prediction(TARGET, Rude(), PROFILES, "rows")
    assert worth((QUICK,)) == pytest.approx(100 / 3 + 800 / 1.1)
    assert chosen(worth) == ["quick", "mid", "slow"]
    assert colocate.rank_by_prediction(TARGET, Rude(), PROFILES, "relative")((QUICK,)) == pytest.approx(1 / 3 + 1 / 1.1)
    assert chosen(colocate.rank_by_prediction(TARGET, Rude(), PROFILES, "relative"))[-1] == "quick"
    assert chosen(worth, 2)[0] == "quick+mid"
    assert chosen(worth, 3) == ["quick+slow+mid"]


class WideTail(Rude):
    """Slow everybody by half in the median, and as `Rude` in the tail."""

    def __init__(self, quantile: float = 0.9) -> None:
        self._quantile = quantile

    def with_quantile(self, quantile: float) -> WideTail:
        return WideTail(quantile)

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1.5 if self._quantile == 0.5 else super().slowdown(victim, colocated)


@pytest.mark.parametrize("predictor", [WideTail(), ScaledInterference(WideTail(), 1.0)])
def test_rank_by_prediction_compares_medians(predictor: Interference) -> None:
    """As the documented figures do: a sum of throughputs is expected, not promised."""
    worth = colocate.rank_by_prediction(TARGET, predictor, PROFILES, "rows")
    assert worth((QUICK,)) == pytest.approx((100 + 800) / 1.5)


def test_rank_by_rule_orders_candidates_by_one_feature() -> None:
    assert chosen(colocate.rank_by_rule("memcap", PROFILES)) == ["slow", "quick", "mid"]
    assert chosen(colocate.rank_by_rule("sm", PROFILES)) == ["quick", "mid", "slow"]
    assert chosen(colocate.rank_by_rule("mem", PROFILES))[0] == "quick"
    bare = {("mid", "gpu"): Profile("mid", "gpu", [Point(share=1000, batch=8, latency=0.1, memory=0)])}
    with pytest.raises(PlanError, match="'sm' needs the column 'sm_util_pct', which a profile of mid lacks"):
        colocate.rank_by_rule("sm", bare)((MID,))
    with pytest.raises(PlanError, match="'memcap' needs memory, which is 0 in all profiles"):
        colocate.rank_by_rule("memcap", bare)


def test_rank_by_measurement_ignores_the_order_of_loads() -> None:
    runs = [ColocatedRun((MID, TARGET), (70.0, 90.0)), ColocatedRun((SLOW, TARGET), (9.0, 99.0))]
    assert chosen(colocate.rank_by_measurement(TARGET, runs, PROFILES, "rows")) == ["mid", "slow"]
    assert colocate.rank_by_measurement(TARGET, runs, PROFILES, "relative")((SLOW,)) == pytest.approx(0.9 + 0.99)
    assert chosen(colocate.rank_by_measurement(TARGET, runs, PROFILES, "relative")) == ["slow", "mid"]


def test_rank_at_random_chooses_every_candidate() -> None:
    rng = np.random.default_rng(1)
    assert {chosen(colocate.rank_at_random(rng))[0] for _ in range(30)} == {"quick", "slow", "mid"}


def test_candidate_sets_beyond_memory_or_limit_are_rejected() -> None:
    room = 7 << 30
    assert colocate.candidate_sets(TARGET, [QUICK, SLOW, MID], 1, PROFILES, room) == [(QUICK,), (SLOW,)]
    assert colocate.candidate_sets(TARGET, [QUICK, SLOW, MID], 2, PROFILES, room) == [(QUICK, SLOW)]
    with pytest.raises(PlanError, match="no 3 of 3 candidates fit next to 'target' within 7 GiB"):
        colocate.candidate_sets(TARGET, [QUICK, SLOW, MID], 3, PROFILES, room)
    with pytest.raises(PlanError, match="sets of 7 candidates exceed the limit of 100000"):
        colocate.candidate_sets(TARGET, [QUICK] * 60, 7, PROFILES)


def test_throughput_alone_outside_profile_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="model 'quick': a batch of 8 on 50 % is outside its profile"):
        colocate.throughput_alone(Load("quick", "gpu", 8, 500), PROFILES)
