from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft
from cotenant.planners.check import check
from cotenant.planners.cluster import fits
from cotenant.planners.kind_by_kind import Instance
from cotenant.planners.score import Pod, met_score, node_binding, partition_score, plan, violated_score
from cotenant.predictors import Load
from tests.planners.problems import profile

A30 = Kind(name="a30", cuts=(250, 500, 1000), geometry="mig-a30-24gb", memory=24 << 30)
V100 = Kind(name="v100", cuts=(250, 500, 1000))

# NTUA thesis, chapter 6: onnx_resnet50_1024 alone, in queries/s: 1P, 2P and 4P of the A30 and of the V100.
RESNET = {"a30": {1000: 286.14, 500: 220.66, 250: 139.45}, "v100": {1000: 268.11, 500: 207.70, 250: 163.82}}


def problem(rates: dict[str, float], *fleet: Kind) -> Problem:
    """Every model is the thesis' ResNet-50, with batches of one."""
    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in rates),
        rates=rates,
        fleet=fleet,
        profiles={
            (name, kind): profile(name, kind, {(share, 1): 1 / qps for share, qps in RESNET[kind].items()})
            for name in rates
            for kind in RESNET
        },
    )


def cuts(plan: Plan) -> dict[str, list[tuple[int, list[str]]]]:
    return {
        str(device.id): [(cut.share, [p.model for p in cut.placements]) for cut in device.partitions]
        for device in plan.devices
    }


def test_scores_of_one_workload_are_the_curves_of_figure_8_1() -> None:
    """Both fall with the error; one below its objective scores half of what one that just meets it does, at most."""
    assert [met_score(error) for error in (0.0, 1.0, 3.0)] == [1.0, 0.5, 0.25]
    assert [violated_score(error) for error in (0.0, 1.0, 2.0)] == [0.5, 0.2, 0.1]


def test_partition_score_is_the_weighted_mean_of_section_8_3_1() -> None:
    """100 · (1 - util) · (k · mean of score_1 + (1 - k) · mean of score_2), k = 1/3."""
    pods = [Pod(100.0, 100.0), Pod(100.0, 200.0), Pod(100.0, 50.0)]
    expected = (1 / 3) * (1 / (1 + 1.5**2)) + (2 / 3) * ((1.0 + 0.5) / 2)
    assert partition_score(pods, 0.0) == pytest.approx(100 * expected)
    assert partition_score(pods, 0.25) == pytest.approx(75 * expected)
    assert partition_score([Pod(100.0, 100.0)], 0.0) == 100.0
    assert partition_score([Pod(100.0, 50.0)], 0.0) == pytest.approx(100 / (1 + 1.5**2))


@pytest.mark.parametrize(("rate", "share"), [(280.0, 1000), (200.0, 500), (130.0, 250), (60.0, 250)])
def test_score_cuts_an_empty_mig_device_where_the_objective_is_just_met(rate: float, share: int) -> None:
    made = plan(problem({"a": rate}, A30))
    assert cuts(made) == {"a30-0": [(share, ["a"])]}


@pytest.mark.parametrize(("rate", "share"), [(260.0, 1000), (200.0, 500), (160.0, 250)])
def test_score_limits_a_workload_to_the_smallest_mps_share_that_meets_its_objective(rate: float, share: int) -> None:
    assert cuts(plan(problem({"a": rate}, V100))) == {"v100-0": [(share, ["a"])]}


def test_score_serves_a_rate_that_devices_just_reach_but_for_rounding() -> None:
    made = plan(problem({"a": 3 * 268.11 * (1 + 1e-10)}, msgspec.structs.replace(V100, count=3)))
    assert [len(device.partitions) for device in made.devices] == [1, 1, 1]


def test_score_chooses_the_kind_that_comes_nearest_to_the_objective() -> None:
    """139 queries/s: a quarter of the A30 reaches 139.45, of the V100 163.82. 160: the V100's, for the A30's half
    reaches 220."""
    both = (msgspec.structs.replace(A30, count=1), msgspec.structs.replace(V100, count=1))
    asked = problem({"a": 139.0, "b": 160.0}, *both)
    assert cuts(plan(asked)) == {"a30-0": [(250, ["a"])], "v100-0": [(250, ["b"])]}


class Lossy:
    """Each co-located model takes a tenth of a victim's throughput."""

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1 / (1 - 0.1 * len(colocated))


def test_score_expects_less_by_the_interference_of_each_colocated_workload() -> None:
    """A second workload on the V100 loses a tenth of 163.82, and so needs half of it for 150 queries/s."""
    asked = msgspec.structs.replace(problem({"a": 100.0, "b": 150.0}, V100), interference=Lossy())
    there = DeviceDraft(V100, [PartitionDraft(250, {"a": 100.0})])
    binding = node_binding(asked, there, Instance("b", 150.0))
    assert binding is not None
    assert [cut.share for cut in binding.cuts] == [250, 500]
    # a: 163.82 · 0.9 = 147.4 of 100; b: 207.7 · 0.9 = 186.9 of 150; a's quarter is busy for 100/163.82 of the time.
    errors = [0.474, 0.246]
    idle = 1 - 0.25 * 100 / 163.82
    assert binding.score == pytest.approx(100 * idle * sum(1 / (1 + e) for e in errors) / 2, rel=1e-3)
    assert check(plan(asked), asked) == []


def test_score_expects_less_by_the_time_that_others_in_the_partition_take() -> None:
    """`b` has what `a` leaves of 286.14 queries/s on the whole A30, `a` what `b` leaves; it is idle without `a`."""
    asked = problem({"a": 100.0, "b": 50.0}, A30)
    binding = node_binding(asked, DeviceDraft(A30, [PartitionDraft(1000, {"a": 100.0})]), Instance("b", 50.0))
    assert binding is not None
    errors = [(286.14 - 50 - 100) / 100, (286.14 - 100 - 50) / 50]
    idle = 1 - 100 / 286.14
    assert binding.score == pytest.approx(100 * idle * sum(1 / (1 + e) for e in errors) / 2)


def test_score_does_not_cut_a_device_anew_that_is_not_empty() -> None:
    """The first workload needs a whole A30, so the second, for which a quarter would do, shares its time or waits."""
    one = msgspec.structs.replace(A30, count=1)
    made = plan(problem({"a": 150.0, "b": 100.0}, one))
    assert cuts(made) == {"a30-0": [(500, ["a"]), (500, ["b"])]}
    made = plan(problem({"a": 280.0, "b": 100.0}, one))
    assert made.unserved == {"b": 100.0}


def test_score_uses_the_fewest_devices_on_which_everything_fits() -> None:
    """Of these, it takes the one that is least busy."""
    many = msgspec.structs.replace(V100, count=None)
    made = plan(problem(dict.fromkeys("abcdef", 160.0), many))
    assert [len(device.partitions) for device in made.devices] == [3, 3]
    assert made.unserved == {}


class Counting:
    """Slow every pair by 10 %, and count what is asked."""

    interferes = True

    def __init__(self) -> None:
        self.asked = 0

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        self.asked += 1
        return 1.1 if colocated else 1.0


def test_device_that_does_not_fit_is_refused_before_it_is_scored() -> None:
    """Most devices of a full cluster are, since who is there would miss its target: what is then asked about each is
    most of a decision."""
    counting = Counting()
    rates = dict.fromkeys("abc", 155.0) | {"d": 10.0}
    asked = msgspec.structs.replace(problem(rates, V100), interference=counting)
    device = DeviceDraft(V100, [PartitionDraft(250, {name: rate}) for name, rate in rates.items() if name != "d"])
    assert node_binding(asked, device, Instance("d", 10.0)) is None
    only_fits = counting.asked
    counting.asked = 0
    assert not fits(asked, DeviceDraft(V100, [*device.cuts, PartitionDraft(250, {"d": 10.0})]))
    assert only_fits == counting.asked > 0
