"""The contract finds what a planner must not do."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.plan import Plan
from cotenant.planners import Problem, contract
from cotenant.planners.elastic import plan as elastic
from tests.planners.problems import embedded


def test_random_problems_of_one_seed_are_equal_and_of_every_kind() -> None:
    some, more = contract.random_problems(20), contract.random_problems(200)
    assert [problem.rates for problem in more[:20]] == [problem.rates for problem in some]
    assert contract.random_problems(5, seed=1)[0].rates != some[0].rates
    assert {len(problem.fleet) for problem in more} == {1, 2}
    assert {len(problem.models) for problem in more} == set(range(1, 7))
    assert any(not any(problem.rates.values()) for problem in more)


@pytest.mark.parametrize("problem", contract.random_problems(50))
def test_contract_of_elastic_on_random_problems_holds(problem: Problem) -> None:
    assert contract.contract_violations(elastic(problem), problem) == []


def test_contract_violations_of_a_wrong_plan_are_reported() -> None:
    problem = embedded()
    plan = elastic(problem)
    (device, *others) = plan.devices
    (partition, *rest) = device.partitions
    (placement, *more) = partition.placements

    def changed(**fields: float) -> Plan:
        made = msgspec.structs.replace(placement, **fields)
        cut = msgspec.structs.replace(partition, placements=(made, *more))
        return msgspec.structs.replace(
            plan, devices=(msgspec.structs.replace(device, partitions=(cut, *rest)), *others)
        )

    assert contract.contract_violations(plan, problem) == []
    (less, *_) = contract.contract_violations(changed(rate=placement.rate / 2), problem)
    assert less.startswith(f"{placement.model}: ")
    assert "are served or reported as unserved" in less
    assert contract.contract_violations(changed(batch=10_000), problem)
    (lie,) = contract.contract_violations(msgspec.structs.replace(plan, bound=2.0), problem)
    assert lie == "the plan comes to 1, which its bound of 2 says is impossible"
    most = msgspec.structs.replace(plan, objective="rate", bound=0.9)
    assert contract.contract_violations(most, problem) == [
        "the plan comes to 1 times the rates, which its bound of 0.9 says is impossible"
    ]
    idle = msgspec.structs.replace(problem, rates=dict.fromkeys(problem.rates, 0.0))
    assert f"nothing is asked for, and {plan.devices_used} devices are used" in contract.contract_violations(plan, idle)
