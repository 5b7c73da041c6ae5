"""Plan as InSS does (2023, section 5): a learnt policy decides on devices and shares, Algorithm 1 on batches.

1. Where a plan is in force whose partitions have batches that serve the rates, only batches change (case 1).
2. Else the policy's likeliest action decides on a device and a share for each model, and batches follow (case 2).

The policy is the problem's, from a file (`cotenant train`). Without one it is trained on the spot for the problem's
rates, with as many steps as the time limit allows; the plan is then the best action that training met, since so short
a training does not converge.

Each model runs on one device (constraint 1e) and in a partition of its own; the paper maximises throughput on given
devices, so all of them may be used, whatever the objective. What it leaves open:

- rates that a model's device does not sustain are unserved; the batch is then the one that sustains most;
- Algorithm 1 assumes batches of 4 of co-located models. Where batches miss a target with the real ones, the smallest
  that serve the rates are taken, and where none do, a device's rates are lowered together until they hold;
- with a policy the latencies are those of the problem's interference predictor, `analytic` being the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Plan
from cotenant.errors import PlanError
from cotenant.planners.capacity import (
    PartitionDraft,
    batched_partitions,
    max_throughput_batch,
    partitions_with_batches,
    with_totals,
)
from cotenant.planners.check import check
from cotenant.planners.inss.batch_decision import BatchDecision, decide_batches
from cotenant.planners.inss.cluster import Cluster, Provisioning, adjusted
from cotenant.planners.inss.environment import Environment, used_part
from cotenant.planners.problem import Problem

STEPS_PER_SECOND = 20  # of a training on the spot, with updates of `SPOT_BATCH` transitions
SPOT_BATCH = 32
HALVINGS = 6  # of the part of its rates that a device without feasible batches loses


def plan(problem: Problem) -> Plan:
    """Plan by the problem's policy, or by one trained on the spot; what a model's device does not sustain is unserved.

    Raises PlanError for a policy of another cluster, models or planner, and where there is none and nothing to train
    one with.
    """
    cluster = Cluster.of(problem)
    if problem.policy is not None:
        _require_policy(cluster)
    rates = [problem.rates.get(name, 0.0) for name in cluster.models]
    if not cluster.devices or not any(rates):
        return with_totals(Plan(planner="inss"), problem)
    kept = _kept(cluster, rates)
    return kept if kept is not None else _acted(cluster, rates)


def _require_policy(cluster: Cluster) -> None:
    """Raise PlanError where the problem's policy is not for this cluster, or another planner's."""
    policy = cluster.problem.policy
    assert policy is not None
    policy.require("inss")
    policy.require_cluster(
        fleet=cluster.fleet_hash,
        devices=[kind.name for kind in cluster.devices],
        models=cluster.models,
        models_hash=cluster.models_hash,
    )
    if policy.heads != cluster.heads:
        raise PlanError(
            f"the policy chooses among {list(policy.heads)} devices and shares by model, the cluster has"
            f" {list(cluster.heads)}; train one with `cotenant train`"
        )


def provisioning_of(cluster: Cluster, plan: Plan) -> Provisioning | None:
    """Return where a plan has each model; None where it is no plan of InSS': a model on two partitions, or two models
    on one, or devices that the cluster does not have."""
    names = [(device.kind, device.id.index) for device in plan.devices]
    indices = {identity: n for n, identity in enumerate(_identities(cluster))}
    devices, shares = [0] * len(cluster.models), [0] * len(cluster.models)
    for identity, device in zip(names, plan.devices, strict=True):
        for partition in device.partitions:
            if len(partition.placements) != 1 or identity not in indices:
                return None
            (placement,) = partition.placements
            if placement.model not in cluster.models or placement.procs != 1:
                return None
            model = cluster.models.index(placement.model)
            if shares[model]:
                return None
            devices[model], shares[model] = indices[identity], partition.share
    return Provisioning(tuple(devices), tuple(shares))


def _kept(cluster: Cluster, rates: Sequence[float]) -> Plan | None:
    """Return the plan in force with other batches (case 1); None where there is none, a rate is not served, or its
    shares are not legal on the devices as they are now."""
    current = cluster.problem.current
    where = None if current is None else provisioning_of(cluster, current)
    if where is None or any(rate > 0 and not share for rate, share in zip(rates, where.shares, strict=True)):
        return None
    shares = tuple(share if rate > 0 else 0 for rate, share in zip(rates, where.shares, strict=True))
    where = Provisioning(where.devices, shares)
    decision = decide_batches(cluster, where, rates, [0.0] * len(rates))
    if any(rate > 0 and not feasible for rate, feasible in zip(rates, decision.feasible, strict=True)):
        return None
    made = _plan(cluster, where, decision, rates)
    return None if made.unserved or check(made, cluster.problem) else made


def _acted(cluster: Cluster, rates: Sequence[float]) -> Plan:
    """Return the plan of the policy's action (case 2)."""
    policy = cluster.problem.policy
    if policy is None:
        actions = _trained_actions(cluster, rates)
    else:
        environment = Environment(cluster, policy.low, policy.high)
        state = environment.at(rates, _used_memory(cluster))
        actions = [np.array(policy.choices(state), dtype=np.int64).reshape(-1, 2)]
    return min(
        (_plan_of_action(cluster, action, rates) for action in actions), key=lambda made: sum(made.unserved.values())
    )


def _plan_of_action(cluster: Cluster, choices: NDArray[np.int64], rates: Sequence[float]) -> Plan:
    """Return the plan of an action: by model, a device and a share. rates: by model."""
    where = adjusted(cluster, choices, [rate > 0 for rate in rates])
    return _plan(cluster, where, decide_batches(cluster, where, rates, [0.0] * len(rates)), rates)


def _trained_actions(cluster: Cluster, rates: Sequence[float]) -> list[NDArray[np.int64]]:
    """Train at these rates for as long as the time limit allows; return the best action met and the likeliest one."""
    try:
        from cotenant.planners.inss.training import TrainingOptions, train_at
    except ModuleNotFoundError as error:
        raise PlanError(
            "planner 'inss' decides by a trained policy, and the problem names none: make one with `cotenant train` and"
            f" write `policy = \"policy.json\"`; training needs {error.name}: pip install 'cotenant[learn]'"
        ) from None
    steps = max(1, round(STEPS_PER_SECOND * cluster.problem.time_limit))
    return train_at(cluster, rates, TrainingOptions(episodes=1, steps=steps, batch=SPOT_BATCH))


def _used_memory(cluster: Cluster) -> list[float]:
    """Return the part of each device's memory that the plan in force uses; 0 without one."""
    current = cluster.problem.current
    used = dict.fromkeys(_identities(cluster), 0)
    for device in current.devices if current is not None else ():
        identity = device.kind, device.id.index
        for partition in device.partitions if identity in used else ():
            for placement in partition.placements:
                profile = cluster.problem.profile(placement.model, device.kind)
                used[identity] += 0 if profile is None else placement.procs * profile.memory(placement.batch)
    return [used_part(bytes_, kind) for bytes_, kind in zip(used.values(), cluster.devices, strict=True)]


def _identities(cluster: Cluster) -> list[tuple[str, int]]:
    """Return kind and index of each device."""
    kinds = [kind.name for kind in cluster.devices]
    return [(name, kinds[:n].count(name)) for n, name in enumerate(kinds)]


def _plan(cluster: Cluster, where: Provisioning, decision: BatchDecision, rates: Sequence[float]) -> Plan:
    devices = []
    for n, (name, index) in enumerate(_identities(cluster)):
        partitions = _partitions(cluster, n, where, decision, rates)
        if partitions:
            devices.append(Device(id=DeviceId(name, index), partitions=partitions))
    return with_totals(Plan(planner="inss", devices=tuple(devices)), cluster.problem)


def _partitions(
    cluster: Cluster, device: int, where: Provisioning, decision: BatchDecision, rates: Sequence[float]
) -> tuple[Partition, ...]:
    """Return the partitions of one device, with as much of its models' rates as they sustain."""
    problem, kind = cluster.problem, cluster.devices[device]
    drafts, batches = [], []
    for i in where.on(device):
        batch, rate = decision.batches[i], rates[i]
        if not decision.feasible[i]:
            curve = tuple(
                seconds * cluster.slowdown(i, b, where, decision.batches)
                for b, seconds in enumerate(cluster.curve(i, device, where.shares[i]), 1)
            )
            batch, most = max_throughput_batch(curve, float(cluster.slos[i]))
            rate = min(rate, most)
        if rate > 0:
            drafts.append(PartitionDraft(where.shares[i], {cluster.models[i]: rate}))
            batches.append([batch])
    made = partitions_with_batches(problem, kind, drafts, batches)
    if made is not None:
        return made
    while drafts:
        least, step, best = 0.0, 1.0, None
        for _ in range(HALVINGS):
            scaled = [
                PartitionDraft(draft.share, {name: (least + step) * rate for name, rate in draft.rates.items()})
                for draft in drafts
            ]
            partitions = batched_partitions(problem, kind, scaled)
            if partitions is not None:
                best, least = partitions, least + step
                if least == 1.0:
                    break
            step /= 2
        if best is not None:
            return best
        drafts.pop()
    return ()
