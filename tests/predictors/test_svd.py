from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import Load, svd
from cotenant.predictors.fitting import from_json, to_json
from cotenant.predictors.samples import Sample

NAN = np.nan
# Rows are multiples of each other.
WHOLE = np.outer([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0, 10.5, 20.0, 21.0])


def without(*gaps: tuple[int, int]) -> svd.Matrix:
    values = WHOLE.copy()
    for gap in gaps:
        values[gap] = NAN
    return values


def test_predict_by_similarity_equals_hand_calculation() -> None:
    """Rank one, so a column is its latent features; the gap is column 3, 20.5 away from nothing else but column 2."""
    values = np.array([[3.0, 3.0, NAN], [4.0, 4.0, 4.0]])
    latent = np.array([[3.0, 4.0], [3.0, 0.0], [0.0, 0.0]])
    found = svd.predict_by_similarity(values, lambda _: latent)
    assert found[0, 2] == pytest.approx((3 / (1 + 5) + 3 / (1 + 3)) / (1 / (1 + 5) + 1 / (1 + 3)))
    assert np.array_equal(found[1], values[1])


def test_predict_by_similarity_uses_filled_entries() -> None:
    values = np.array([[6.0, NAN, NAN], [1.0, 1.0, 1.0]])
    assert svd.predict_by_similarity(values)[0].tolist() == [6.0, 6.0, 6.0]


def test_complete_chooses_method_by_gaps_of_each_row() -> None:
    """Of four entries, one missing is filled by regression, two by similarity."""
    values = without((0, 3), (5, 1), (5, 3))
    mixed, likeness, regression = (
        svd.complete(values),
        svd.predict_by_similarity(values),
        svd.predict_by_regression(values),
    )
    assert mixed[0, 3] == regression[0, 3] != likeness[0, 3]
    assert np.array_equal(mixed[5], likeness[5])
    assert np.array_equal(mixed[1:5], WHOLE[1:5])
    assert mixed[0, 3] == pytest.approx(WHOLE[0, 3], rel=0.05)
    assert np.array_equal(svd.complete(WHOLE), WHOLE)


def test_complete_with_empty_row_or_column_raises_plan_error() -> None:
    rows, columns = WHOLE.shape
    with pytest.raises(
        PlanError, match=f"^row 3 of {rows} of the matrix has no measurement; measure one there, or leave"
    ):
        svd.complete(without(*((2, column) for column in range(columns))))
    with pytest.raises(PlanError, match=f"^column 2 of {columns} of the matrix has no measurement"):
        svd.complete(without(*((row, 1) for row in range(rows))))


def loads(model: str, *shares: int) -> list[Load]:
    return [Load(model, "gpu", 8, share) for share in shares]


VICTIMS = [*loads("a", 200, 500), *loads("b", 200, 500)]
BESIDE = [*loads("a", 800, 500), *loads("b", 800, 500)]


def samples() -> list[Sample]:
    """A row's loss is 10, 20, 30 or 40 % beside any model."""
    return [
        Sample(victim, (beside,), 1.0, 1 / (1 - 0.1 * (i + 1)))
        for i, victim in enumerate(VICTIMS)
        for j, beside in enumerate(BESIDE)
        if (i, j) != (1, 2)
    ]


def test_losses_beside_several_loads_add_up_and_round_trip() -> None:
    fitted = svd.fit(samples(), {})
    _, again = from_json(to_json("svd", fitted), "it.json")
    assert again == fitted
    assert fitted.slowdown(VICTIMS[3], [BESIDE[0]]) == pytest.approx(1 / 0.6)
    assert fitted.slowdown(VICTIMS[1], [BESIDE[2]]) == pytest.approx(1 / 0.8, rel=0.02)  # was not measured
    assert fitted.slowdown(VICTIMS[0], [BESIDE[0], BESIDE[3]]) == pytest.approx(1 / 0.8)
    assert fitted.slowdown(VICTIMS[3], BESIDE) == pytest.approx(1 / (1 - svd.MAX_LOSS))
    assert fitted.slowdown(VICTIMS[3], []) == 1.0


def test_losses_at_unsampled_points_use_the_nearest() -> None:
    fitted = svd.fit(samples(), {})
    assert fitted.slowdown(Load("b", "gpu", 3, 190), [Load("a", "gpu", 1, 700)]) == pytest.approx(1 / 0.7)
    with pytest.raises(PlanError, match="model 'c' on 'gpu' was no co-located model in any sample"):
        fitted.slowdown(VICTIMS[0], [Load("c", "gpu", 8, 800)])


def test_losses_slowdown_is_at_least_1() -> None:
    faster = [Sample(each.victim, each.colocated, 1.0, 0.9) for each in samples()]
    assert svd.fit(faster, {}).slowdown(VICTIMS[0], [BESIDE[0]]) == 1.0


def test_svd_fit_to_too_few_pairs_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="4 pairs are too few to fill a matrix of 1 victims by 4"):
        svd.fit(samples()[:4], {})


def test_isolated_completes_unprofiled_throughputs() -> None:
    """d is twice as fast as c; at two of six places it was not measured."""
    shares, batches = (200, 500, 1000), (1, 8)

    def profile(model: str, speed: float, *, hidden: tuple[tuple[int, int], ...] = ()) -> Profile:
        return Profile(
            model,
            "gpu",
            [
                Point(share=share, batch=batch, latency=batch / (speed * share), memory=0)
                for share in shares
                for batch in batches
                if (share, batch) not in hidden
            ],
        )

    profiles = {
        (each.model, "gpu"): each
        for each in (
            *(profile(f"c{i}", 1.0 + i / 4) for i in range(12)),
            profile("d", 2.0, hidden=((500, 8), (1000, 8))),
        )
    }
    found = svd.isolated(profiles)
    assert found[Load("d", "gpu", 1, 1000)] == pytest.approx(2000)
    assert found[Load("d", "gpu", 8, 500)] == pytest.approx(1000, rel=0.02)
    assert found[Load("d", "gpu", 8, 1000)] == pytest.approx(2000, rel=0.02)
