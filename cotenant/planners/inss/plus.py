"""Plan by a policy of InSS' kind that starts from `geometry`'s plan: `inss-plus`, ours.

1. A plan in force whose partitions have batches for the rates stays, whoever made it; without one, geometry makes it.
2. Else the policy decides, with actions masked: models come in descending order of the share that they need, and each
   gets the device and the share that the policy thinks likeliest among those that serve its rate and are left. Where
   none is left, the device with most left. Where that leaves rates unserved, the least shares on the same devices are
   tried as well.

Training masks what no device serves, and keeps the entropy out of the critics' targets (sac.py). A policy knows the
models that it was trained for, at any rates within its range; without a policy geometry plans anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import geometry
from cotenant.planners.check import check
from cotenant.planners.inss import plan_of_action, require_policy, used_memory
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.environment import Environment
from cotenant.planners.local_search import rebatched_plan
from cotenant.planners.problem import Problem
from cotenant.planners.rates import rescaled_plan

INTERFERENCE_MARGIN = 1.15  # on rates, when a share is chosen before it is known what else runs on the device


def plan(problem: Problem) -> Plan:
    """Keep the plan in force where its partitions serve the rates, else act by the policy.

    Raises PlanError for a policy of another cluster, models or planner.
    """
    cluster = Cluster.of(problem)
    if problem.policy is not None:
        require_policy(cluster, "inss-plus")
    kept = _kept(problem)
    if kept is not None:
        return kept
    rates = [problem.rates.get(name, 0.0) for name in cluster.models]
    if problem.policy is None or problem.current is None or not cluster.devices or not any(rates):
        return msgspec.structs.replace(geometry.plan(problem), planner="inss-plus")
    action, needed = _masked_action(cluster, rates)
    made = plan_of_action(cluster, action, rates)
    if made.unserved:
        made = min(made, plan_of_action(cluster, needed, rates), key=lambda each: sum(each.unserved.values()))
    return msgspec.structs.replace(made, planner="inss-plus")


def _kept(problem: Problem) -> Plan | None:
    """Return the plan in force at the problem's rates, with other batches; None where that violates anything."""
    current = problem.current
    if current is None or problem.objective == "rate":
        return None
    carried = current.rates()
    if any(bool(carried.get(name)) != bool(rate) for name, rate in problem.rates.items()):
        return None
    if any(device.kind not in {kind.name for kind in problem.fleet} for device in current.devices):
        return None
    rescaled = rescaled_plan(msgspec.structs.replace(current, objective="devices", bound=None), problem)
    kept = rebatched_plan(rescaled, problem)
    if kept is None or check(kept, problem):
        return None
    return msgspec.structs.replace(kept, planner="inss-plus", provenance=None)


def _masked_action(cluster: Cluster, rates: Sequence[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a device and a share for each model, of the policy's likeliest among those that serve its rate; and the
    same devices with the least shares that do."""
    policy = cluster.problem.policy
    assert policy is not None
    state = Environment(cluster, policy.low, policy.high).at(rates, used_memory(cluster))
    logits = policy.logits(state).reshape(len(rates), -1)
    devices = len(cluster.devices)
    shares = np.array([[cluster.share(d, u) for u in range(cluster.shares)] for d in range(devices)])
    margin = INTERFERENCE_MARGIN if cluster.problem.interference.interferes else 1.0
    enough = cluster.sustained >= margin * np.array(rates)[:, None, None]
    needed = np.where(enough, shares[None], 2 * WHOLE).min(axis=2)
    left = np.full(devices, WHOLE)
    partitions = np.array([kind.max_partitions or len(rates) for kind in cluster.devices])
    action = np.zeros((len(rates), 2), dtype=np.int64)
    least = np.zeros_like(action)
    for i in np.argsort(-needed.min(axis=1), kind="stable"):
        if not rates[i]:
            continue
        open_ = partitions > 0
        fits = open_ & (needed[i] <= left)
        device = int(np.argmax(np.where(fits, logits[i, :devices], -np.inf) if fits.any() else left * open_))
        possible = enough[i, device] & (shares[device] <= left[device])
        if possible.any():
            choice = int(np.argmax(np.where(possible, logits[i, devices:], -np.inf)))
        else:
            choice = int(np.argmin(np.abs(shares[device] - left[device])))
        action[i] = device, choice
        least[i] = device, int(np.argmax(enough[i, device])) if enough[i, device].any() else choice
        # What a share takes beyond the need is given back when shares are adjusted; later models need only find theirs.
        left[device] -= min(int(needed[i, device]), int(shares[device, choice]))
        partitions[device] -= 1
    return action, least
