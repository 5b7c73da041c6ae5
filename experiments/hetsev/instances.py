"""Place instances of one fixed share each, as HetSev's scheduler does at its core (section 4.2, Algorithm 1, step 3).

An instance goes to the GPU with the most left, and never to one that has an instance of the same model (worst fit with
anti-affinity). HetSev leaves shares to the GPU; here each instance has its part for itself. Which instance comes first,
by k-means queues and weighted fairness, matters only where instances wait for each other, which they do not here. All
GPUs are filled: a further instance goes to the model whose instances are the busiest.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from cotenant.control.scaling.hetsev import instance_capacity
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, batched_partitions, build_plan

EASING = 0.95  # factor on the rates of a GPU until its instances keep up


class InstancePlanner(msgspec.Struct, frozen=True):
    """Plan for a problem of one kind of device.

    share: ‰ of a device that each instance has. repeats: whether a device may have several instances of one model.
    """

    share: int = WHOLE
    repeats: bool = False

    def __call__(self, problem: Problem) -> Plan:
        (kind,) = problem.fleet
        placed = self._placed(problem, kind)
        instances = Counter(model for models in placed for model in models)
        drafts = [
            _easing(problem, DeviceDraft(kind, [self._draft(problem, model, instances[model]) for model in models]))
            for models in placed
        ]
        return build_plan(problem, "instances", drafts)

    def _placed(self, problem: Problem, kind: Kind) -> list[list[str]]:
        """Return the models that have an instance on each device."""
        slots = WHOLE // self.share
        devices: list[list[str]] = [[] for _ in range(kind.count or 0)]
        load = {
            name: rate / capacity
            for name, rate in problem.rates.items()
            if rate > 0 and (capacity := instance_capacity(problem, name, kind.name, self.share))
        }
        instances: Counter[str] = Counter()
        while load:
            model = max(load, key=lambda name: (not instances[name], load[name] / max(1, instances[name])))
            fits = [device for device in devices if len(device) < slots and (self.repeats or model not in device)]
            if not fits:
                del load[model]
                continue
            min(fits, key=len).append(model)
            instances[model] += 1
        return [device for device in devices if device]

    def _draft(self, problem: Problem, model: str, instances: int) -> PartitionDraft:
        return PartitionDraft(self.share, {model: problem.rates[model] / instances})


def _easing(problem: Problem, draft: DeviceDraft) -> DeviceDraft:
    """Lower the rates of a device until its instances keep up within their targets."""
    while batched_partitions(problem, draft.kind, draft.cuts) is None:
        for cut in draft.cuts:
            for model in cut.rates:
                cut.rates[model] *= EASING
    return draft
