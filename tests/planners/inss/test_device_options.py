"""Options of devices: what they sustain is what `check` allows, and what a moved device lacks is counted right."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import latency_curve, max_throughput_batch, with_totals
from cotenant.planners.check import check
from cotenant.planners.inss import moves as moves_module
from cotenant.planners.inss.device_options import (
    MAX_PATTERNS,
    Options,
    capacities_of,
    cutting_patterns,
    options_of,
    sustained_partitions,
)
from cotenant.planners.inss.moves import FEATURES, DeviceStates, moved_by_gain, moved_by_pairs
from cotenant.predictors import ConstantMargin
from tests.planners.inss.cases import TENTHS, two_devices


def alone(model: int) -> tuple[tuple[int, int], ...]:
    return ((model, 100),)


def slowed(factor: float = 1.2, **options: object) -> Problem:
    return msgspec.structs.replace(two_devices(**options), interference=ConstantMargin(factor))  # type: ignore[arg-type]


def test_patterns_leave_no_room_for_another_partition() -> None:
    assert cutting_patterns(Kind(name="k", cuts=(400, 600, 1000))) == [(400, 400), (600, 400), (1000,)]
    assert cutting_patterns(Kind(name="k", cuts=(300, 1000), max_partitions=2)) == [(300, 300), (1000,)]
    assert len(cutting_patterns(Kind(name="k", cuts=TENTHS))) == 42, "the partitions of the number 10"
    every = cutting_patterns(Kind(name="k", cuts=tuple(range(10, 1001, 10))))
    assert 20 < len(every) <= MAX_PATTERNS


def test_patterns_of_mig_are_legal_placements() -> None:
    patterns = cutting_patterns(Kind(name="k", cuts=(142, 285, 428, 1000), geometry="mig-a100-80gb"))
    assert {(428, 428), (428, 285, 285), (1000,)} <= set(patterns)
    assert (428, 428, 142) not in patterns, "two of 3/7 take all of the memory"


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_options_sustain_what_check_allows_and_no_more(factor: float) -> None:
    problem = slowed(factor, rates=(1.0, 1.0, 1.0))
    options = options_of(problem)
    names = [model.name for model in problem.models]
    assert len(options.partitions) > 50
    for partitions, capacity in zip(options.partitions[::7], options.capacities[::7], strict=True):
        rates = dict(zip(names, capacity.tolist(), strict=True))
        at = msgspec.structs.replace(problem, rates=rates)
        made = with_totals(Plan(planner="p", devices=(Device(id=DeviceId("k", 0), partitions=partitions),)), at)
        assert check(made, at) == [] and not made.unserved
        assert capacities_of(partitions, names) == pytest.approx(capacity)


def test_batches_are_those_that_sustain_most_under_the_slowdown() -> None:
    """Alone the best batch within 50 ms on half of a device is 23 ((2 + 23) · 2 ms); 1.2 times as slow it is 18."""
    assert max_throughput_batch(latency_curve(two_devices(), "a", "k", 500), 0.1)[0] == 23
    problem = slowed()
    made = sustained_partitions(problem, problem.fleet[0], ((500, alone(0)), (500, alone(1))))
    assert made is not None and [part.placements[0].batch for part in made] == [18, 18]
    assert made[0].placements[0].rate == pytest.approx(18 / (1.2 * 0.040))
    single = sustained_partitions(problem, problem.fleet[0], ((500, alone(0)),))
    assert single is not None and single[0].placements[0].batch == 23


def test_two_models_of_a_partition_have_their_parts_of_the_longest_round_within_their_targets() -> None:
    """A round with 60 % for `a` may take 100 / 1.6 = 62.5 ms: 37.5 and 25 ms on the whole device."""
    problem = two_devices()
    made = sustained_partitions(problem, problem.fleet[0], ((1000, ((0, 60), (1, 40))),))
    assert made is not None
    (partition,) = made
    curves = [latency_curve(problem, name, "k", 1000) for name in "ab"]
    expected = [
        max(b for b, took in enumerate(curve, 1) if took <= most)
        for curve, most in zip(curves, (0.0375, 0.025), strict=True)
    ]
    assert [p.batch for p in partition.placements] == expected
    duty = sum(curve[batch - 1] for curve, batch in zip(curves, expected, strict=True))
    assert [p.rate for p in partition.placements] == pytest.approx([batch / duty for batch in expected])


def test_options_have_models_that_share_a_partition_where_that_wastes_little() -> None:
    """With a target of 12 ms only small batches leave room for another model's, so that none do."""
    shared = [len(part.placements) == 2 for each in options_of(two_devices()).partitions for part in each]
    assert any(shared) and not all(shared)
    tight = two_devices(slo=0.012)
    assert not any(len(part.placements) > 1 for each in options_of(tight).partitions for part in each)


def test_options_within_little_memory_have_fewer_partitions() -> None:
    """A worker takes 4 MiB."""
    problem = two_devices(rates=(1.0, 1.0, 1.0), memory=9 << 20)
    options = options_of(problem)
    assert options.workers.tolist() and options.workers.max() == 2


def test_models_that_meet_their_target_nowhere_are_in_no_option() -> None:
    problem = two_devices()
    never = msgspec.structs.replace(problem, models=(problem.models[0], Model(name="b", slo=0.001)))
    options = options_of(never)
    assert len(options.partitions) and not options.capacities[:, 1].any() and options.sizes[1] == 0


def test_options_are_made_once_for_a_problem_at_any_rates() -> None:
    problem = two_devices()
    again = msgspec.structs.replace(problem, rates={"a": 3.0, "b": 5.0})
    assert options_of(problem) is options_of(again)
    assert options_of(problem) is not options_of(msgspec.structs.replace(again, interference=ConstantMargin(1.3)))


def states(rates: list[float]) -> DeviceStates:
    options = options_of(two_devices(rates=(1.0, 1.0)))
    return DeviceStates(options, np.array(rates), [0, 0], np.zeros((2, 2)))


def test_moves_come_by_what_they_serve_and_never_lead_back() -> None:
    made = states([900.0, 900.0])
    assert made.unserved == 1.0
    moves = made.moves()
    after = made.features(moves)[:, FEATURES.index("unserved_after")]
    assert (np.diff(after) >= -1e-6).all() and set(moves.device.tolist()) == {0}, "empty devices are alike"
    first = int(moves.option[0])
    assert made.make(0, first) > 0
    lacking = np.maximum(0.0, made.rates - made.options.capacities[first]).sum() / 1800
    assert made.unserved == pytest.approx(lacking)
    assert first not in made.moves().option[made.moves().device == 0]


def test_features_count_work_in_devices() -> None:
    """Rates of half of what a device sustains of each model are the work of one device; two lie idle."""
    sizes = states([1.0, 1.0]).options.sizes
    made = states((sizes / 2).tolist())
    row = dict(zip(FEATURES, made.features(made.moves())[0].tolist(), strict=True))
    assert row["load"] == pytest.approx(0.5)
    assert row["unserved_before"] == 1.0 and row["opens_device"] == 1.0 and row["rank"] == 0.0
    assert row["devices_over_models"] == 1.0


def test_device_is_needed_for_what_others_do_not_sustain() -> None:
    """Two devices of one option: at its own rates either does without the other, at twice these neither does."""
    options = options_of(two_devices(rates=(1.0, 1.0)))
    one = options.capacities[int(np.argmin(options.capacities.max(axis=1) / options.capacities.sum(axis=1)))]
    work = float((one / options.sizes).sum())
    for times, needed in ((1.0, 0.0), (1.5, work / 2), (2.0, work)):
        made = DeviceStates(options, times * one, [0, 0], np.stack([one, one]))
        rows = made.features(made.moves())
        assert rows[:, FEATURES.index("work_of_device_before")] == pytest.approx(needed)


def test_all_is_served_after_the_right_moves() -> None:
    made = states([500.0, 500.0])
    while not made.served:
        moves = made.moves()
        made.make(int(moves.device[0]), int(moves.option[0]))
    assert (made.capacities.sum(axis=0) >= made.rates * (1 - 1e-9)).all()


def test_no_option_sustains_as_much_of_every_model_as_another_and_more() -> None:
    capacities = options_of(two_devices(rates=(1.0, 1.0, 1.0))).capacities
    assert len(capacities) > 10
    for own in capacities:
        as_much = capacities[(capacities >= own).all(axis=1)]
        assert not (as_much > own).any()


def test_best_pair_is_the_best_of_all_pairs_where_every_option_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = two_devices(rates=(900.0, 300.0, 500.0))
    options = options_of(problem)
    monkeypatch.setattr(moves_module, "SHORTLIST", len(options.capacities))
    rates = np.array([900.0, 300.0, 500.0])
    states = DeviceStates(options, rates, [0, 0], np.zeros((2, 3)))
    unserved, (first, second) = states.best_pair(0, 1)
    both = options.capacities[:, None] + options.capacities[None]
    expected = np.maximum(0.0, rates - both).sum(axis=2).min() / rates.sum()
    assert unserved == pytest.approx(expected, abs=1e-5)
    assert states.best_pair(0, 1, beat=unserved + 1e-6) == (unserved, (first, second))
    assert states.best_pair(0, 1, beat=-1.0) == (1.0, (-1, -1)), "no pair leaves less than nothing"
    states.make(0, first)
    states.make(1, second)
    assert states.unserved == pytest.approx(expected, abs=1e-5)


def test_pairs_serve_more_where_no_single_device_does() -> None:
    # Either move alone serves no more than before; both at once serve all.
    options = Options(
        ((), (), (), ()),
        np.zeros(4, dtype=np.int64),
        np.array([[8.0, 0.0], [0.0, 8.0], [6.0, 4.0], [4.0, 6.0]]),
        np.ones(4, dtype=np.int64),
        np.array([8.0, 8.0]),
    )
    states = DeviceStates(options, np.array([10.0, 10.0]), [0, 0], options.capacities[:2])
    assert moved_by_gain(states, 1).unserved == pytest.approx(states.unserved) == pytest.approx(0.2)
    moved = moved_by_pairs(states, 2)
    assert moved.served
    assert sorted(moved.chosen) == [2, 3]
    assert states.chosen == [-1, -1]
