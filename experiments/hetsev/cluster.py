"""Define the cluster and models of HetSev's evaluation (Mo et al., Electronics 2023, section 6) for simulation.

The authors published no measurements, and none of a T4 with its models is available. So the cluster has only V100s, and
models measured on a V100 take the roles: ResNet-50 its own, SSD that of SSD-ResNet50, VGG-19 of Inception-v3, AlexNet
of the Transformer. SLOs, attainments and largest batches are HetSev's; rates are multiples of what the cluster serves.
One kind of GPU cannot show HetSev's choice of kinds.

Systems that are compared: "K8S" gives every instance its own GPU, as Kubernetes does. "HetSev" places two on one, which
is what section 3 studies, by `instances`. Both scale by HetSev's heuristic, since the paper set both up alike. "integer
program" is HetSev with the program that its heuristic approximates, for the rate at 80 % saturation. "geometry" plans
for the same; "tracking" is our own controller, which plans by geometry when rates have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from cotenant.control.periodic import PeriodicOptions
from cotenant.control.scaling import ScalingPolicy
from cotenant.control.scaling.hetsev import GreedyScaling, LeastCostScaling
from cotenant.control.scaling.rates import TargetRateOptions
from cotenant.control.scaling.static import StaticScaling
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Planner, Problem, portfolio
from cotenant.planners.rates import at_scale
from cotenant.predictors.linear import Linear, Utilisation, least_squares
from cotenant.published import v100
from cotenant.workload import Workload
from cotenant.workload.sources import Curve
from experiments.autoscaled_runs import AutoscaledRun, run_autoscaled, run_tracked
from experiments.gpulet.ground_truth import MeasuredInterference
from experiments.hetsev.instances import InstancePlanner

# Model of the paper → measured model that plays it, SLO in seconds, largest batch.
MODELS = {
    "ResNet50": ("resnet50", 0.4, 8),
    "Inception-v3": ("vgg19", 0.6, 8),
    "SSD-ResNet50": ("ssd", 0.9, 4),
    "Transformer": ("alexnet", 1.2, 2),
}
ATTAINMENT = 0.98
DEVICES = 4  # half of the paper's V100s, so that a run takes a minute
CUTS = (200, 400, 500, 600, 800, WHOLE)
PERIOD = 15.0  # seconds, as of the Horizontal Pod Autoscaler that HetSev changed
STARTUP = 10.0  # seconds; the paper does not say
SATURATION = 0.8
# Factor on rates that tracking plans for. The default of 1.2 is for workers that start within a second; here they take
# ten, in which Figure 7's load rises by 30 % of its low.
HEADROOM = 1.4
CO_LOCATED = 500  # ‰ of a GPU for each of two instances


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a system. policy: "greedy", "program", "planner" where that says itself how many GPUs it needs, or
    "tracking" where our controller does.

    share: ‰ of a GPU for each instance; None where the planner decides.
    """

    name: str
    policy: str
    share: int | None = None

    @property
    def alone(self) -> bool:
        """Return whether each instance has a GPU to itself."""
        return self.share == WHOLE

    def planner(self) -> Planner:
        """Return what plans for given devices."""
        return portfolio.plan if self.share is None else InstancePlanner(self.share)

    def scaling(self, devices: int) -> ScalingPolicy:
        """Return the policy for a cluster of so many GPUs."""
        share = self.share or WHOLE
        policies: dict[str, ScalingPolicy] = {
            "greedy": GreedyScaling(share=share, saturation=SATURATION),
            "program": LeastCostScaling(share=share),
            "planner": StaticScaling(devices={v100.KIND: devices}),
        }
        return policies[self.policy]

    @property
    def options(self) -> PeriodicOptions:
        """Return how rates are observed. The heuristic adds its headroom itself."""
        headroom = 1.0 if self.policy == "greedy" else 1 / SATURATION
        rates = TargetRateOptions(headroom=headroom, low_headroom=headroom)
        return PeriodicOptions(period=PERIOD, rates=rates, fill=self.share is not None, launch_seconds=LAUNCH)

    def first_plan(self, asked: Problem) -> Plan:
        """Return the plan on the fewest GPUs that serves the rates at the saturation that is aimed at."""
        wanted = at_scale(asked, 1 / SATURATION)
        if self.share is None:
            return self.planner()(wanted)
        (kind,) = asked.fleet
        for count in range(1, (kind.count or 0) + 1):
            fleet = (msgspec.structs.replace(kind, count=count),)
            plan = self.planner()(msgspec.structs.replace(wanted, fleet=fleet))
            if not plan.unserved:
                break
        return plan


K8S = System(name="K8S", policy="greedy", share=WHOLE)
HETSEV = System(name="HetSev", policy="greedy", share=CO_LOCATED)
PROGRAM = System(name="integer program", policy="program", share=CO_LOCATED)
TRACKING = System(name="tracking", policy="tracking")
SYSTEMS = (K8S, HETSEV, PROGRAM, System(name="geometry", policy="planner"), TRACKING)
LAUNCH = {v100.KIND: STARTUP}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a run. curves: requests/s of each model over time; seconds: its length; devices: of the cluster."""

    system: System
    curves: dict[str, Curve]
    seconds: float
    seed: int
    devices: int = DEVICES


def simulate_run(run: Run) -> AutoscaledRun:
    """Simulate a cluster that a system scales, from its plan for the first rates on."""
    system = run.system
    rates = {name: curve.at(0.0) for name, curve in run.curves.items()}
    asked = problem(rates, alone=system.alone, devices=run.devices)
    environment, workload = cluster(rates, run.devices), Workload(run.curves)
    if system.policy == TRACKING.policy:
        return run_tracked(
            at_scale(asked, HEADROOM),  # every system begins with headroom
            environment,
            workload,
            seconds=run.seconds,
            startup=STARTUP,
            seed=run.seed,
            period=PERIOD,
            headroom=HEADROOM,
        )
    return run_autoscaled(
        asked,
        environment,
        system.planner(),
        system.scaling(run.devices),
        system.options,
        workload,
        first=system.first_plan(asked),
        seconds=run.seconds,
        startup=STARTUP,
        seed=run.seed,
    )


def problem(rates: Mapping[str, float], *, alone: bool = False, devices: int = DEVICES) -> Problem:
    """Return the problem that a system plans for. rates: requests/s by model."""
    cuts, most = ((WHOLE,), 1) if alone else (CUTS, None)
    return Problem(
        models=tuple(
            Model(name=name, slo=MODELS[name][1], attainment=ATTAINMENT, max_batch=MODELS[name][2]) for name in rates
        ),
        rates=dict(rates),
        fleet=(Kind(name=v100.KIND, count=devices, cuts=cuts, max_partitions=most),),
        profiles={(name, v100.KIND): _profiles()[name] for name in rates},
        interference=_formula(),
    )


def cluster(rates: Mapping[str, float], devices: int = DEVICES) -> Problem:
    """Return the problem to simulate, with measured interference."""
    return msgspec.structs.replace(problem(rates, devices=devices), interference=_truth())


def served(mix: Mapping[str, float], devices: int = DEVICES) -> float:
    """Return the largest multiple of a mix for which geometry has a plan."""
    return portfolio.plan(msgspec.structs.replace(problem(mix, devices=devices), objective="rate")).scale


@functools.cache
def _profiles() -> dict[str, Profile]:
    measured = v100.profiles()
    return {
        name: Profile(name, v100.KIND, measured[player, v100.KIND].points) for name, (player, _, _) in MODELS.items()
    }


@functools.cache
def _formula() -> Linear:
    known = {name: Utilisation.of(profile) for (name, _), profile in v100.profiles().items()}
    used = {name: Utilisation.of(profile) for name, profile in _profiles().items()}
    return Linear(least_squares(v100.pairs(), known), used)


@functools.cache
def _truth() -> MeasuredInterference:
    return MeasuredInterference(_formula(), v100.pairs(), {name: player for name, (player, _, _) in MODELS.items()})
