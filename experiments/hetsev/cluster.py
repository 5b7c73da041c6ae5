"""Define the cluster and models of HetSev's evaluation (Mo et al., Electronics 2023, section 6) for simulation.

The authors published no measurements, and none of a T4 with its models is available. So the cluster has only V100s, and
models measured on a V100 take the roles: ResNet-50 its own, SSD that of SSD-ResNet50, VGG-19 of Inception-v3, AlexNet
of the Transformer. SLOs, attainments and largest batches are HetSev's; rates are multiples of what the cluster serves.
One kind of GPU cannot show HetSev's choice of kinds.

Three systems are compared. "K8S" gives every instance its own GPU, as Kubernetes does. "co-located" places several on
one, as HetSev does, by gpulet's elastic partitioning: HetSev leaves shares to the GPU, and Cotenant has no planner with
its rules yet. The third is geometry. All scale when instances are 80 % busy (section 4.1).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from cotenant.control.scaling.scaler import ScalingOptions
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem, portfolio
from cotenant.predictors.linear import Linear, Utilisation, least_squares
from experiments.data import v100
from experiments.gpulet.ground_truth import MeasuredInterference

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
POLICY = ScalingOptions(period=15.0, room=1 / 0.8, little_room=1 / 0.8)
STARTUP = 10.0  # seconds; the paper does not say


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a system. alone: each instance has a GPU to itself."""

    name: str
    planner: str
    alone: bool = False


K8S = System(name="K8S", planner="bestfit", alone=True)
SYSTEMS = (K8S, System(name="co-located", planner="elastic"), System(name="geometry", planner="geometry"))


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
