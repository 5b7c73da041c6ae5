"""Planner `inss`, its policies and their files."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem, contract
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, build_plan
from cotenant.planners.check import check
from cotenant.planners.inss import plan, provisioning_of
from cotenant.planners.inss.batch_decision import decide_batches
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.environment import Environment
from cotenant.planners.inss.sac import SacOptions
from cotenant.planners.inss.training import Episode, TrainingOptions, train
from cotenant.planners.policy import Policy
from cotenant.planning import plan as plan_problem
from tests.planners.inss.cases import two_devices

QUICK = TrainingOptions(
    episodes=30, steps=10, batch=32, learner=SacOptions(hidden=(32, 32), learning_rate=3e-3, temperature=0.3)
)


@pytest.fixture(scope="module")
def trained() -> tuple[Policy, list[Episode]]:
    curve: list[Episode] = []
    cluster = Cluster.of(two_devices(rates=(400.0, 400.0)))
    return train(cluster, [100.0, 100.0], [400.0, 400.0], QUICK, curve.append), curve


def with_policy(policy: Policy, **options: object) -> Problem:
    return msgspec.structs.replace(two_devices(**options), policy=policy)  # type: ignore[arg-type]


def test_training_raises_the_reward_and_lowers_violations(trained: tuple[Policy, list[Episode]]) -> None:
    _, curve = trained
    assert len(curve) == QUICK.episodes
    first, last = curve[:6], curve[-6:]
    assert np.mean([e.reward for e in last]) > np.mean([e.reward for e in first])
    assert np.mean([e.violated for e in last]) <= np.mean([e.violated for e in first])


def test_training_with_equal_seeds_gives_equal_policies() -> None:
    cluster = Cluster.of(two_devices())
    short = msgspec.structs.replace(QUICK, episodes=4)
    once, again = (train(cluster, [10.0, 10.0], [100.0, 50.0], short) for _ in range(2))
    other = train(cluster, [10.0, 10.0], [100.0, 50.0], msgspec.structs.replace(short, seed=1))
    assert once == again
    assert once.layers != other.layers


def test_plan_serves_what_the_policy_was_trained_for(trained: tuple[Policy, list[Episode]]) -> None:
    problem = with_policy(trained[0], rates=(400.0, 400.0))
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert made.planner == "inss" and not made.unserved


def test_policy_decides_on_plain_arrays_as_the_network_does(trained: tuple[Policy, list[Episode]]) -> None:
    policy = trained[0]
    assert Policy.from_json(policy.to_json(), "p.json") == policy
    cluster = Cluster.of(two_devices(rates=(400.0, 400.0)))
    state = Environment(cluster, policy.low, policy.high).at([200.0, 300.0])
    values = state
    for n, part in enumerate(policy.layers):
        values = values @ np.array(part.weights) + np.array(part.bias)
        values = np.maximum(values, 0.0) if n < len(policy.layers) - 1 else values
    assert policy.logits(state) == pytest.approx(values)
    assert policy.choices(state) == [int(np.argmax(head)) for head in np.split(values, np.cumsum(policy.heads)[:-1])]


def test_rates_change_a_plan_in_force_by_its_batches_alone(trained: tuple[Policy, list[Episode]]) -> None:
    """Case 1: Algorithm 1 has batches for the partitions that are there, so the policy is not asked, which would leave
    no share idle."""
    before = plan(with_policy(trained[0], rates=(100.0, 100.0)))
    current = msgspec.structs.replace(
        before,
        devices=tuple(
            msgspec.structs.replace(
                device,
                partitions=tuple(msgspec.structs.replace(each, share=each.share - 100) for each in device.partitions),
            )
            for device in before.devices
        ),
    )
    problem = msgspec.structs.replace(with_policy(trained[0], rates=(130.0, 100.0)), current=current)
    after = plan(problem)

    def partitions(made: Plan) -> list[tuple[object, int]]:
        return [(device.id, partition.share) for device in made.devices for partition in device.partitions]

    assert partitions(after) == partitions(current) and not after.unserved
    cluster = Cluster.of(problem)
    where = provisioning_of(cluster, after)
    assert where is not None
    decided = dict(zip("ab", decide_batches(cluster, where, [130.0, 100.0], [0.0, 0.0]).batches, strict=True))
    assert {p.model: p.batch for d in after.devices for part in d.partitions for p in part.placements} == decided


@pytest.mark.parametrize("change", [{"cuts": (250, 500, 750, 1000)}, {"max_partitions": 1}, {"cuts": (300,)}])
def test_plan_in_force_is_not_kept_on_devices_that_forbid_it_now(change: dict[str, object]) -> None:
    """Its 30 % and 70 % of one device would serve the rates."""
    before = two_devices(rates=(20.0, 20.0))
    (kind,) = before.fleet
    halves = [PartitionDraft(300, {"a": 20.0}), PartitionDraft(700, {"b": 20.0})]
    current = build_plan(before, "inss", [DeviceDraft(kind, halves)])
    kept = msgspec.structs.replace(before, current=current, time_limit=0.1)
    assert [part.share for device in plan(kept).devices for part in device.partitions] == [300, 700]
    changed = msgspec.structs.replace(kept, fleet=(msgspec.structs.replace(kind, **change),))
    made = plan_problem(changed, "inss", validate=False)
    assert [str(violation) for violation in check(made, changed)] == []


@pytest.mark.parametrize("held", [False, True])
def test_devices_without_memory_serve_nothing(held: bool) -> None:
    before = two_devices()
    current = build_plan(before, "inss", [DeviceDraft(before.fleet[0], [PartitionDraft(500, {"a": 20.0})])])
    without = msgspec.structs.replace(two_devices(memory=0), time_limit=0.1, current=current if held else None)
    assert plan(without).unserved == without.rates


def test_rates_that_no_batches_serve_are_given_other_shares(trained: tuple[Policy, list[Episode]]) -> None:
    """Case 2: `a` has a tenth of a device, which serves 40 requests/s at most."""
    squeezed = plan(with_policy(trained[0], rates=(20.0, 0.0)))
    (device,) = squeezed.devices
    (partition,) = device.partitions
    small = msgspec.structs.replace(partition, share=100)
    current = msgspec.structs.replace(squeezed, devices=(msgspec.structs.replace(device, partitions=(small,)),))
    problem = msgspec.structs.replace(with_policy(trained[0], rates=(300.0, 0.0)), current=current)
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert not made.unserved and made.devices[0].partitions[0].share > 100


def test_rates_that_no_action_serves_are_reported_as_unserved(trained: tuple[Policy, list[Episode]]) -> None:
    problem = with_policy(trained[0], rates=(5000.0, 10.0))
    made = plan(problem)
    assert contract.contract_violations(made, problem) == []
    assert 0 < made.unserved["a"] < 5000 and "b" not in made.unserved


@pytest.mark.parametrize("problem", contract.random_problems(30, seed=7))
def test_plans_of_policies_trained_on_the_spot_hold_the_contract(problem: Problem) -> None:
    quick = msgspec.structs.replace(problem, time_limit=0.25)
    assert contract.contract_violations(plan(quick), quick) == []


def altered(policy: Policy, **changes: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(policy, **changes))


def test_policy_of_something_else_is_an_error_that_says_of_what(trained: tuple[Policy, list[Episode]]) -> None:
    policy = trained[0]
    three = msgspec.structs.replace(two_devices(rates=(1.0, 1.0, 1.0)), policy=policy)
    with pytest.raises(PlanError, match=r"^the policy was trained for the models a, b, the problem has a, b, c; train"):
        plan(three)
    (kind,) = two_devices().fleet
    fleet = (msgspec.structs.replace(kind, count=1),)
    with pytest.raises(PlanError, match=r"^the policy was trained for another cluster \(2 × k; hash .*1 × k \(hash"):
        plan(msgspec.structs.replace(with_policy(policy), fleet=fleet))
    with pytest.raises(PlanError, match=r"^the policy was trained for other targets or profiles of these models"):
        plan(with_policy(policy, slo=0.2))
    with pytest.raises(PlanError, match=r"^the policy is untrained \(updates = 0\)"):
        plan(with_policy(msgspec.structs.replace(policy, updates=0)))
    with pytest.raises(PlanError, match=r"^the policy chooses among \[2, 14, 2, 6\] .* has \[2, 10, 2, 10\]; train"):
        plan(with_policy(msgspec.structs.replace(policy, heads=(2, 14, 2, 6))))
    with pytest.raises(PlanError, match=r"^the policy is of planner 'other', not of 'inss'"):
        plan(with_policy(msgspec.structs.replace(policy, planner="other")))


def test_file_that_is_no_policy_is_an_error_with_its_place(trained: tuple[Policy, list[Episode]]) -> None:
    policy = trained[0]
    first = policy.layers[0]
    for text, message in (
        (b"{", r"^p\.json: is not a policy: "),
        (b'{"version": 1}', r"^p\.json: is not a policy: Object missing required field `planner`"),
        (
            altered(policy, version=2),
            r"^p\.json: is a policy of version 2, this program reads version 1; train it again",
        ),
        (altered(policy, layers=()), r"^p\.json: is a policy without layers"),
        (altered(policy, layers=policy.layers[1:2] * 2), r"^p\.json: "),
        (altered(policy, heads=(2, 10, 2, 9)), r"^p\.json: has 24 outputs for 23 choices$"),
        (altered(policy, heads=(24,)), r"^p\.json: has the heads \[24\]; each of 2 models takes two, of at least one"),
        (altered(policy, heads=(-2, 14, 2, 10)), r"^p\.json: has the heads \[-2, 14, 2, 10\]; each of 2 models"),
        (altered(policy, low=(1.0,)), r"^p\.json: has rates of 1 \(low\) and 2 \(high\) models for 2 models$"),
        (altered(policy, high=(1.0,)), r"^p\.json: has rates of 2 \(low\) and 1 \(high\) models for 2 models$"),
        (
            altered(policy, layers=(msgspec.structs.replace(first, weights=first.weights[1:]), *policy.layers[1:])),
            r"^p\.json: layer 0 has 5 inputs for a state of 6 numbers",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            Policy.from_json(text, "p.json")


def test_training_that_diverges_is_an_error() -> None:
    wild = msgspec.structs.replace(
        QUICK, learner=SacOptions(hidden=(8,), learning_rate=1e30, temperature=1.0), episodes=40
    )
    with pytest.raises(PlanError, match=r"^training diverged in episode \d+: .* lower the learning rate of 1e\+30$"):
        train(Cluster.of(two_devices()), [10.0, 10.0], [100.0, 50.0], wild)
