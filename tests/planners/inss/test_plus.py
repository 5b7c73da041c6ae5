"""Planner `inss-plus`: the plan in force, changed device by device by a policy that knows no model by its name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem, contract, geometry
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, build_plan
from cotenant.planners.check import check
from cotenant.planners.inss import plus
from cotenant.planners.inss.device_options import options_of
from cotenant.planners.inss.moves import FEATURES
from cotenant.planners.inss.plus import plan
from cotenant.planners.inss.plus_training import LEARNER, PlusOptions, train
from cotenant.planners.inss.training import Episode
from cotenant.planners.policy import Policy, layer
from cotenant.predictors import ConstantMargin
from tests.planners.inss.cases import two_devices
from tests.planners.problems import MIB, linear

QUICK = PlusOptions(episodes=12, batch=16, learner=msgspec.structs.replace(LEARNER, hidden=(16,)))
HIGH = (400.0, 400.0, 400.0)


@pytest.fixture(scope="module")
def trained() -> tuple[Policy, list[Episode]]:
    curve: list[Episode] = []
    return train([strangers()], QUICK, curve.append), curve


@pytest.fixture(scope="module")
def policy(trained: tuple[Policy, list[Episode]]) -> Policy:
    return trained[0]


def strangers() -> Problem:
    """Return models and devices that no other problem here has."""
    cuts = (200, 400, 600, 1000)
    names = ("x", "y", "z", "w")
    return Problem(
        models=tuple(Model(name=name, slo=0.05 * (n + 1)) for n, name in enumerate(names)),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="other", count=3, cuts=cuts),),
        profiles={
            (name, "other"): linear(name, "other", 0.003, 0.0005 * (n + 1), cuts, (1, 16), MIB)
            for n, name in enumerate(names)
        },
        interference=ConstantMargin(1.1),
    )


def in_force(policy: Policy | None, before: tuple[float, ...], rates: tuple[float, ...], **changes: object) -> Problem:
    """Return a problem of new rates, with geometry's plan for others in force."""
    current = geometry.plan(msgspec.structs.replace(two_devices(rates=before), time_limit=0.5))
    return msgspec.structs.replace(two_devices(rates=rates), policy=policy, current=current, **changes)


def partitions(made: Plan) -> list[tuple[object, list[int]]]:
    return [(device.id, [partition.share for partition in device.partitions]) for device in made.devices]


def test_plan_of_the_geometry_planner_keeps_what_ended_its_search() -> None:
    made = plan(msgspec.structs.replace(two_devices(rates=(300.0, 300.0, 100.0)), time_limit=0.2))
    assert made.planner == "inss-plus" and made.provenance is not None
    assert made.provenance.source.startswith("geometry, ")
    assert made.provenance.ended_by in {"work", "proof"}


@pytest.mark.slow
def test_plan_in_force_stays_while_batches_serve_the_rates(policy: Policy) -> None:
    problem = in_force(policy, (300.0, 300.0, 100.0), (290.0, 280.0, 110.0))
    made = plan(problem)
    assert problem.current is not None
    assert partitions(made) == partitions(problem.current)
    assert made.planner == "inss-plus" and not made.unserved
    assert contract.contract_violations(made, problem) == []


def test_shared_partition_in_force_stays_where_other_batches_serve_the_rates(policy: Policy) -> None:
    """On the whole of a device 3 rows of `a` and 20 of `b` take 27 ms; 20 of `a` and 3 of `b` need other batches."""
    problem = two_devices(rates=(60.0, 600.0))
    shared = [PartitionDraft(1000, {"a": 60.0, "b": 600.0}, batches={"a": 3, "b": 28})]
    current = build_plan(problem, "mine", [DeviceDraft(problem.fleet[0], shared)])
    swapped = msgspec.structs.replace(two_devices(rates=(600.0, 60.0)), policy=policy, current=current)
    made = plan(swapped)
    assert partitions(made) == partitions(current) and not made.unserved
    assert contract.contract_violations(made, swapped) == []


def test_rates_that_a_plan_in_force_does_not_serve_are_served_by_moves(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy was trained on other models, targets and devices."""
    problem = in_force(policy, (50.0, 10.0, 10.0), (400.0, 390.0, 380.0))
    monkeypatch.setattr(geometry, "plan", None)  # is not asked
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert not made.unserved


def test_moves_serve_rates_drawn_at_random_that_two_devices_sustain(policy: Policy) -> None:
    rng = np.random.default_rng(4)
    before = in_force(policy, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    for _ in range(60):
        rates = dict(zip("abc", rng.uniform(50.0, 400.0, 3).tolist(), strict=True))
        problem = msgspec.structs.replace(before, rates=rates)
        made = plan(problem)
        assert contract.contract_violations(made, problem) == []
        assert not made.unserved


def test_rate_of_one_model_may_need_several_devices(policy: Policy) -> None:
    """A device sustains at most some 860 requests/s of it, and InSS' own planner would stop there."""
    problem = in_force(policy, (50.0, 10.0), (1500.0, 0.0))
    made = plan(problem)
    assert not made.unserved and made.devices_used == 2
    assert contract.contract_violations(made, problem) == []


def test_rates_beyond_the_fleet_are_served_in_part_and_the_rest_is_reported(policy: Policy) -> None:
    problem = in_force(policy, (50.0, 10.0, 10.0), (5000.0, 10.0, 10.0))
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert 0 < made.unserved["a"] < 4000


def test_devices_may_be_opened_as_far_as_the_fleet_has_them(policy: Policy) -> None:
    kind = two_devices().fleet[0]
    for count, most in ((1, 1), (None, 3)):
        fleet = (msgspec.structs.replace(kind, count=count),)
        problem = in_force(policy, (50.0, 10.0, 10.0), (600.0, 600.0, 600.0), fleet=fleet)
        made = plan(problem)
        assert made.devices_used <= most and check(made, problem) == []
        assert bool(made.unserved) == (count == 1)


@pytest.mark.parametrize("number", range(12))
def test_plans_from_a_plan_in_force_hold_the_contract_on_random_problems(number: int, policy: Policy) -> None:
    """With several kinds, MIG, memory and interference; the plan in force is for a third of the rates."""
    problem = contract.random_problems(12, seed=11)[number]
    quick = msgspec.structs.replace(problem, time_limit=0.25, policy=policy, objective="devices")
    fewer = msgspec.structs.replace(quick, rates={name: rate / 3 for name, rate in quick.rates.items()})
    moved = msgspec.structs.replace(quick, current=geometry.plan(fewer))
    assert contract.contract_violations(plan(moved), moved) == []


def test_plan_in_force_that_is_illegal_now_is_replaced(policy: Policy) -> None:
    """Its shares are not among the cuts any more."""
    problem = in_force(policy, (300.0, 300.0, 100.0), (300.0, 300.0, 100.0))
    changed = msgspec.structs.replace(
        problem, fleet=(msgspec.structs.replace(problem.fleet[0], cuts=(250, 500, 750, 1000)),)
    )
    made = plan(changed)
    assert check(made, changed) == [] and not made.unserved


def test_policy_that_makes_the_worst_moves_leaves_no_more_unserved_than_the_plan_in_force(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plus, "BY_GAIN", 0)
    weights = np.array([[1.0 if name == "rank" else 0.0] for name in FEATURES])
    worst = msgspec.structs.replace(policy, layers=(layer(weights, np.zeros(1)),))
    problem = in_force(worst, (400.0, 390.0, 380.0), (700.0, 690.0, 680.0))
    made = plan(problem)
    monkeypatch.setattr(plus, "BY_POLICY", 0)
    start = plan(problem)
    assert start.unserved and sum(made.unserved.values()) <= sum(start.unserved.values())


def test_plan_that_check_rejects_is_never_returned(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that promise three times what they sustain lead to such a plan; the one in force is kept instead."""
    problem = in_force(policy, (50.0, 10.0, 10.0), (400.0, 390.0, 380.0))
    options = options_of(problem)
    wrong = tuple(
        tuple(
            msgspec.structs.replace(
                part,
                placements=tuple(
                    msgspec.structs.replace(p, duty=p.duty / 3, latency=p.latency / 3) for p in part.placements
                ),
            )
            for part in each
        )
        for each in options.partitions
    )
    monkeypatch.setattr(plus, "options_of", lambda _: msgspec.structs.replace(options, partitions=wrong))
    made = plan(problem)
    assert problem.current is not None
    assert check(made, problem) == [] and made.unserved
    assert partitions(made) == partitions(problem.current)


@pytest.mark.parametrize("problem", contract.random_problems(5, seed=3))
def test_plans_without_a_policy_are_geometrys(problem: Problem) -> None:
    quick = msgspec.structs.replace(problem, time_limit=0.25)
    made = plan(quick)
    assert contract.contract_violations(made, quick) == []
    assert made.devices == geometry.plan(quick).devices


def test_training_reports_every_episode_and_equal_seeds_give_equal_policies(
    trained: tuple[Policy, list[Episode]],
) -> None:
    policy, curve = trained
    assert [episode.number for episode in curve] == list(range(12))
    assert all(0 <= episode.violated <= 1 for episode in curve)
    assert policy.updates > 0
    assert train([strangers()], QUICK) == policy
    assert train([strangers()], msgspec.structs.replace(QUICK, seed=1)).layers != policy.layers


def test_training_without_a_device_that_serves_anything_is_an_error() -> None:
    for problem in (two_devices(slo=0.001), msgspec.structs.replace(two_devices(), fleet=())):
        with pytest.raises(PlanError, match=r"^a training needs at least one device that serves a model"):
            train([problem], QUICK)


def test_training_that_diverges_is_an_error() -> None:
    wild = msgspec.structs.replace(QUICK, learner=msgspec.structs.replace(QUICK.learner, learning_rate=1e30))
    with pytest.raises(PlanError, match=r"^training diverged in episode \d+: .* lower the learning rate of 1e\+30$"):
        train([strangers()], wild)


def test_policy_survives_its_file(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json(), "p.json") == policy


def refused(policy: Policy) -> Problem:
    return msgspec.structs.replace(two_devices(rates=HIGH), policy=policy)


def test_policy_of_another_planner_version_or_untrained_is_an_error(policy: Policy) -> None:
    with pytest.raises(PlanError, match=r"^the policy is of planner 'inss', not of 'inss-plus'"):
        plan(refused(msgspec.structs.replace(policy, planner="inss")))
    with pytest.raises(PlanError, match=r"^the policy is untrained \(updates = 0\)"):
        plan(refused(msgspec.structs.replace(policy, updates=0)))
    older = msgspec.structs.replace(policy, features=(*FEATURES[:-1], "weight"))
    with pytest.raises(PlanError, match=r"decides by 16 features, .* by 16; only one has rank, weight; train one with"):
        plan(refused(older))
    turned = msgspec.structs.replace(policy, features=FEATURES[::-1])
    with pytest.raises(PlanError, match="by 16, in another order; train one with `cotenant train`"):
        plan(refused(turned))
    without = msgspec.structs.replace(policy, features=())
    with pytest.raises(PlanError, match="decides by 0 features"):
        plan(refused(without))


def test_policy_file_with_layers_for_other_features_is_an_error(policy: Policy) -> None:
    wide = msgspec.structs.replace(policy, layers=(layer(np.zeros((len(FEATURES), 2)), np.zeros(2)),))
    with pytest.raises(PlanError, match=r"^p.json: has 16 inputs and 2 outputs, for 16 features and the value of a"):
        Policy.from_json(wide.to_json(), "p.json")
