"""Planner `inss-plus`: geometry's plan to start from, then a policy whose actions are masked."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.errors import PlanError
from cotenant.planners import Problem, contract, geometry
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.environment import Environment
from cotenant.planners.inss.plus import plan
from cotenant.planners.inss.sac import SacOptions
from cotenant.planners.inss.training import TrainingOptions, train
from cotenant.planners.policy import Policy, layer
from tests.planners.inss.cases import two_devices

QUICK = TrainingOptions(
    planner="inss-plus",
    episodes=10,
    steps=10,
    batch=32,
    learner=SacOptions(hidden=(32, 32), learning_rate=3e-3, temperature=0.3),
)
HIGH = (400.0, 400.0, 400.0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return train(Cluster.of(two_devices(rates=HIGH)), [50.0] * 3, list(HIGH), QUICK)


def in_force(policy: Policy, before: tuple[float, ...], rates: tuple[float, ...]) -> Problem:
    """Return a problem of new rates, with geometry's plan for others in force."""
    current = geometry.plan(msgspec.structs.replace(two_devices(rates=before), time_limit=0.1))
    return msgspec.structs.replace(two_devices(rates=rates), policy=policy, current=current)


def test_mask_leaves_the_shares_that_serve_a_rate() -> None:
    """On a share s a batch of b takes (2 + b) / s ms, twice which must be at most 100: 400 requests/s need 50 %."""
    cluster = Cluster.of(two_devices(rates=HIGH))
    environment = Environment(cluster, [0.0] * 3, list(HIGH))
    environment.at([400.0, 10.0, 1e6])
    mask = environment.mask().reshape(3, -1)
    assert mask[0].tolist() == [True, True] + [False] * 4 + [True] * 6
    assert mask[1].tolist() == [True, True] + [True] * 10
    assert mask[2].all(), "where no choice serves a rate, all are possible"


def test_plan_in_force_stays_while_batches_serve_the_rates(policy: Policy) -> None:
    problem = in_force(policy, (300.0, 300.0, 100.0), (290.0, 280.0, 110.0))
    made = plan(problem)
    assert problem.current is not None
    assert [(d.id, [p.share for p in d.partitions]) for d in made.devices] == [
        (d.id, [p.share for p in d.partitions]) for d in problem.current.devices
    ]
    assert made.planner == "inss-plus" and not made.unserved
    assert contract.contract_violations(made, problem) == []


def test_rates_that_a_plan_in_force_does_not_serve_are_served_by_the_policy(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = in_force(policy, (50.0, 10.0, 10.0), (400.0, 390.0, 380.0))
    monkeypatch.setattr(geometry, "plan", None)  # is not asked
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert not made.unserved


def test_masked_actions_serve_all_that_some_plan_of_one_partition_a_model_serves(policy: Policy) -> None:
    """At rates drawn at random, of which each model needs a share of its own: whenever their least shares fit."""
    rng = np.random.default_rng(4)
    served = 0
    for _ in range(60):
        rates = tuple(float(rate) for rate in rng.uniform(50.0, 400.0, 3))
        problem = in_force(policy, (1.0, 1.0, 1.0), rates)
        made = plan(problem)
        assert contract.contract_violations(made, problem) == []
        served += not made.unserved
    assert served == 60


def test_policy_that_wants_all_models_on_one_device_is_given_what_is_left(policy: Policy) -> None:
    """Three models that need half of a device each."""
    bias = np.tile([1.0] + [0.0] * 11, 3)
    first = msgspec.structs.replace(policy, layers=(layer(np.zeros((8, len(bias))), bias),))
    made = plan(in_force(first, (1.0, 1.0, 1.0), HIGH))
    assert not made.unserved
    assert sorted(len(device.partitions) for device in made.devices) == [1, 2]


@pytest.mark.parametrize("problem", contract.random_problems(5, seed=3))
def test_plans_without_a_policy_are_geometrys(problem: Problem) -> None:
    quick = msgspec.structs.replace(problem, time_limit=0.05)
    made = plan(quick)
    assert contract.contract_violations(made, quick) == []
    assert made.devices == geometry.plan(quick).devices


def test_policy_of_inss_is_an_error(policy: Policy) -> None:
    problem = msgspec.structs.replace(two_devices(rates=HIGH), policy=msgspec.structs.replace(policy, planner="inss"))
    with pytest.raises(PlanError, match=r"^the policy is of planner 'inss', not of 'inss-plus'"):
        plan(problem)
