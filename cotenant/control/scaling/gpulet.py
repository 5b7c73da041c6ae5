"""gpulet's Algorithm 2 (USENIX ATC 2022, section 4.5): one more GPU until the planner succeeds."""

from __future__ import annotations

import msgspec

from cotenant.control.scaling.context import ScalingContext
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Planner


class IncrementalScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Plan for the devices that the plan in force uses; while that fails, for one more, up to the limit.

    What is wanted is what the plan found uses, which may be less: that is N in the next period, as the paper has it.
    The plan is made anew for the devices that there are then, and Algorithm 1 is greedy: it may find no plan for as few
    as its plan for more devices uses. Then that many more are wanted.
    Where the limit does not do (the paper's "unschedulable event"), all that there may be is wanted, and the plan that
    is made then says what it leaves unserved. Raises PlanError for several kinds, since the paper's GPUs are identical,
    and for a kind without a limit that cannot serve a model at all.

    planner: the paper's is "elastic".
    """

    planner: Planner
    horizon: float = 0.0

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        if len(context.problem.fleet) != 1:
            kinds = ", ".join(kind.name for kind in context.problem.fleet) or "none"
            raise PlanError(f"gpulet's scaling knows one kind of device, and there are {kinds}; leave one of them")
        (kind,) = context.problem.fleet
        count = context.plan.devices_used
        while True:
            plan = self._plan(context, count)
            if not plan.unserved:
                used = plan.devices_used
                enough = used == count or not self._plan(context, used).unserved
                return {kind.name: used if enough else count}
            if count >= context.limit(kind.name):
                return {kind.name: count}
            if kind.count is None and count > plan.devices_used + 1:  # another would not be used, either
                models = ", ".join(plan.unserved)
                raise PlanError(f"no number of devices of kind {kind.name!r} serves {models}; leave out what it cannot")
            count += 1

    def _plan(self, context: ScalingContext, count: int) -> Plan:
        """Return the plan for so many devices of the only kind."""
        (kind,) = context.problem.fleet
        fleet = (msgspec.structs.replace(kind, count=count),)
        return self.planner(msgspec.structs.replace(context.problem, fleet=fleet, current=context.plan))
