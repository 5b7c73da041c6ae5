"""Count the devices that predicting interference saves, at the same SLO attainment.

    python -m benchmarks.prediction_savings [--problems 10] [--gpus v100 a100] [--results FILE] [--seconds S] [--json]

Problems: random rates of models with published profiles and measured pairs, at most two partitions a device, Poisson
arrivals. `geometry` plans each for the fewest devices, as `cotenant plan` does but without validation by simulation:

- with a margin of 1.0 (interference ignored) to 1.5 on every latency under co-location,
- with a Gaussian process fitted to a fifth of the pairs, at several quantiles,
- knowing the slowdowns (an oracle),
- without co-location.

Plans are simulated with the measured slowdowns (`experiments.gpulet.ground_truth.MeasuredInterference`, interpolated
over batches and shares). On the V100 no model was measured beside itself: there, the linear formula. Of the A100's
pairs those of old runs are left out (`cotenant.published.a100.matched`).

Even plans without co-location violate a few SLOs, since the forecast of random arrivals errs: a margin or a quantile is
enough where its plans violate no more than these do. The one of fewest devices is chosen on half of the problems, and
its devices and violations are counted on the other half. Each plan is one line of the results
file, which is continued where an earlier run stopped; --seconds ends a run after so long. The process is niced. Plans
do not depend on a clock.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.harness import former_results, keep_result, show
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles
from cotenant.planners import Problem, geometry
from cotenant.planning.pipeline import plan
from cotenant.predictors import ConstantMargin, Interference, Load, NoInterference, QuantilePredictor
from cotenant.predictors.fitting import fit
from cotenant.predictors.gaussian_process import GaussianProcess
from cotenant.predictors.samples import Sample
from cotenant.published import a100, v100
from cotenant.render.table import table
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from experiments.gpulet.ground_truth import MeasuredInterference

CUTS = (200, 400, 500, 600, 800, 1000)  # ‰, as measured
MAX_BATCH = 32
TARGET_FACTORS = (1.5, 2.0, 3.0)  # targets, over twice the latency of a batch of 8 on half of a device
DEVICES = (4.0, 16.0)  # that the rates need about, log-uniform
TRAINING_PART = 0.2  # of all pairs, which the predictor is fitted to
MARGINS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
QUANTILES = (0.5, 0.75, 0.9, 0.97)
TIME_LIMIT = 2.5  # seconds of work of one search
REQUESTS = 30_000  # simulated for each plan
FIRST_SCORED = 1000  # the first of the seeds that are scored; those from 0 choose
CHOSEN = {"margin": "a margin", "prediction": "a prediction"}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of one plan. family: "margin", "prediction", "oracle" or "whole"; setting: margin or quantile.

    devices: of the plan. models, violated: number of SLOs, and of those that the simulation shows violated by more than
    chance; late: fraction of all requests not within their targets; unserved: fraction of all rates.
    """

    gpu: str
    seed: int
    family: str
    setting: float
    devices: int
    models: int
    violated: int
    late: float
    unserved: float

    @property
    def scores(self) -> bool:
        return self.seed >= FIRST_SCORED


class ByTarget:
    """Predict for models of one network with several targets, named `network@factor`."""

    interferes: ClassVar[bool] = True

    def __init__(self, predictor: Interference) -> None:
        self._predictor = predictor
        self._networks: dict[Load, Load] = {}

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return self._predictor.slowdown(self._network(victim), [self._network(load) for load in colocated])

    def _network(self, load: Load) -> Load:
        known = self._networks.get(load)
        if known is None:
            known = self._networks[load] = msgspec.structs.replace(load, model=network_of(load.model))
        return known


def network_of(model: str) -> str:
    return model.partition("@")[0]


class World(msgspec.Struct, frozen=True, dict=True):
    """Hold what was measured on one kind of GPU: profiles of the models with pairs, and the pairs."""

    kind: str
    profiles: Profiles
    samples: list[Sample]

    @functools.cached_property
    def truth(self) -> Interference:
        names = {name: name for name, _ in self.profiles}
        return ByTarget(MeasuredInterference(fit("linear", self.samples, self.profiles), self.samples, names))

    def predictor(self, seed: int) -> GaussianProcess:
        """Return a predictor fitted to random pairs."""
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(self.samples))[: round(TRAINING_PART * len(self.samples))]
        fitted = fit("gaussian-process", [self.samples[n] for n in sorted(chosen.tolist())], self.profiles)
        assert isinstance(fitted, GaussianProcess)
        return fitted


@functools.cache
def world(gpu: str) -> World:
    """Return the world of a GPU: the models that were measured as victims, and their pairs with each other."""
    profiles, samples = (v100.profiles(), v100.pairs()) if gpu == v100.KIND else (a100.profiles(), a100.matched())
    victims = {sample.victim.model for sample in samples}
    own = {key: profile for key, profile in profiles.items() if key[0] in victims}
    return World(gpu, own, [sample for sample in samples if all(load.model in victims for load in sample.colocated)])


def random_problem(gpu: str, seed: int) -> Problem:
    """Return a problem of random rates, without interference."""
    rng = np.random.default_rng(seed)
    profiles: dict[tuple[str, str], Profile] = {}
    models, rates = [], {}
    every = [(name, factor) for name, _ in sorted(world(gpu).profiles) for factor in TARGET_FACTORS]
    count = int(rng.integers(3, 8))
    for n in sorted(rng.permutation(len(every))[:count].tolist()):
        name, factor = every[n]
        profile = world(gpu).profiles[name, gpu]
        model = f"{name}@{factor:g}"
        profiles[model, gpu] = Profile(model, gpu, profile.points)
        models.append(Model(name=model, slo=2 * factor * profile.latency(8, 500), max_batch=MAX_BATCH))
        rates[model] = float(rng.lognormal(0.0, 0.7)) / profile.latency(8, 1000)
    devices = math.exp(rng.uniform(math.log(DEVICES[0]), math.log(DEVICES[1])))
    many = 100
    asked = Problem(
        models=tuple(models),
        rates=rates,
        fleet=(Kind(name=gpu, count=many, cuts=CUTS, max_partitions=2),),
        profiles=profiles,
        objective="rate",
        bounded=False,
        time_limit=TIME_LIMIT,
    )
    multiple = (geometry.bound(asked) or 0.0) * devices / many
    rates = {name: rate * multiple for name, rate in rates.items()}
    return msgspec.structs.replace(asked, rates=rates, objective="devices")


def settings(gpu: str, seed: int) -> Iterator[tuple[str, float, Interference, int]]:
    """Yield each family and setting, the interference that it plans with, and the partitions of a device."""
    yield "whole", 0.0, NoInterference(), 1
    yield "oracle", 0.0, world(gpu).truth, 2
    for margin in MARGINS:
        yield "margin", margin, ConstantMargin(margin), 2
    fitted = world(gpu).predictor(seed)
    for quantile in QUANTILES:
        assert isinstance(fitted, QuantilePredictor)
        yield "prediction", quantile, ByTarget(fitted.with_quantile(quantile)), 2


def scored(asked: Problem, seed: int, family: str, setting: float, interference: Interference, most: int) -> Score:
    """Plan with some interference, and simulate with the measured one."""
    (kind,) = asked.fleet
    fleet = (msgspec.structs.replace(kind, max_partitions=most),)
    made = plan(msgspec.structs.replace(asked, fleet=fleet, interference=interference), validate=False, clock=None)
    real = msgspec.structs.replace(asked, interference=world(kind.name).truth)
    rates = made.rates()
    seconds = REQUESTS / math.fsum(rates.values())
    report = simulate(made, real, Workload.poisson(rates), seconds=seconds, seed=seed)
    offered = math.fsum(row.offered for row in report.models)
    return Score(
        gpu=kind.name,
        seed=seed,
        family=family,
        setting=setting,
        devices=made.devices_used,
        models=len(report.models),
        violated=sum(not row.slo_met for row in report.models),
        late=1 - math.fsum(row.goodput for row in report.models) / offered,
        unserved=math.fsum(made.unserved.values()) / math.fsum(asked.rates.values()),
    )


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """Sum up the scores of one setting: devices of all problems, part of all SLOs violated, mean part of requests late,
    and problems that leave rates unserved."""

    family: str
    setting: float
    devices: int
    violated: float
    late: float
    unserved: int


def totals(scores: Sequence[Score]) -> list[Total]:
    """Return the totals of each setting over the problems that all settings have."""
    groups: dict[tuple[str, float], dict[int, Score]] = {}
    for score in scores:
        groups.setdefault((score.family, score.setting), {})[score.seed] = score
    common = _common(scores)
    return [
        Total(
            family=family,
            setting=setting,
            devices=sum(own[seed].devices for seed in common),
            violated=sum(own[seed].violated for seed in common) / max(1, sum(own[seed].models for seed in common)),
            late=float(np.mean([own[seed].late for seed in common])) if common else 0.0,
            unserved=sum(own[seed].unserved > 0 for seed in common),
        )
        for (family, setting), own in sorted(groups.items())
    ]


def _common(scores: Sequence[Score]) -> set[int]:
    """Return the seeds of the problems that all settings have."""
    seeds: dict[tuple[str, float], set[int]] = {}
    for score in scores:
        seeds.setdefault((score.family, score.setting), set()).add(score.seed)
    return set.intersection(*seeds.values()) if seeds else set()


def cheapest(choosing: Sequence[Total], family: str, allowed: float) -> float | None:
    """Return the setting of a family with fewest devices that violates no more than allowed; None where none does."""
    enough = [each for each in choosing if each.family == family and each.violated <= allowed and not each.unserved]
    return min(enough, key=lambda each: (each.devices, each.violated)).setting if enough else None


def summarise(scores: Sequence[Score], gpu: str, *, as_json: bool) -> None:
    own = [score for score in scores if score.gpu == gpu]
    choosing, scoring = (totals([score for score in own if score.scores == side]) for side in (False, True))
    if not choosing or not scoring:
        return
    by_setting = {(each.family, each.setting): each for each in scoring}
    oracle = by_setting["oracle", 0.0]
    problems = len(_common([score for score in own if score.scores]))
    if not as_json:
        view = table(
            f"{gpu}, {problems} problems that are scored",
            *("planned with", ">setting", ">devices", ">over the oracle's", ">SLOs violated", ">requests late"),
        )
        for each in scoring:
            over = f"{each.devices / oracle.devices - 1:+.1%}"
            setting = f"{each.setting:g}" if each.setting else ""
            view.add_row(each.family, setting, str(each.devices), over, f"{each.violated:.1%}", f"{each.late:.2%}")
        Console(width=120).print(view)
    allowed = next(each.violated for each in choosing if each.family == "whole")
    for family, words in CHOSEN.items():
        name, chosen = f"{gpu}, devices with {words}", cheapest(choosing, family, allowed)
        if chosen is None:
            show(name, f"none is enough: all violate more than {allowed:.1%} of SLOs on the problems that choose")
            continue
        result, whole = by_setting[family, chosen], by_setting["whole", 0.0]
        show(
            name,
            f"{chosen:g} is enough on the problems that choose; on those scored {result.devices} devices,"
            f" {result.devices / oracle.devices - 1:+.1%} over the oracle's and"
            f" {result.devices / whole.devices - 1:+.1%} over those without co-location;"
            f" {result.violated:.1%} of SLOs violated",
            setting=chosen,
            devices=result.devices,
            oracle=oracle.devices,
            whole=whole.devices,
            violated=result.violated,
            late=result.late,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10, help="problems that choose, and as many that are scored")
    parser.add_argument("--gpus", nargs="+", choices=(v100.KIND, a100.KIND), default=[v100.KIND, a100.KIND])
    parser.add_argument("--results", type=Path, help="file of results, continued where it exists")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    options = parser.parse_args()
    os.nice(10)
    scores = former_results(options.results, Score)
    done = {(score.gpu, score.seed, score.family, score.setting) for score in scores}
    end = time.monotonic() + options.seconds
    seeds = [side + n for n in range(options.problems) for side in (0, FIRST_SCORED)]
    for seed, gpu in ((seed, gpu) for seed in seeds for gpu in options.gpus):
        asked: Problem | None = None
        for family, setting, interference, most in settings(gpu, seed):
            if (gpu, seed, family, setting) in done or time.monotonic() > end:
                continue
            asked = asked or random_problem(gpu, seed)
            scores.append(scored(asked, seed, family, setting, interference, most))
            keep_result(options.results, scores[-1])
    for gpu in options.gpus:
        summarise(scores, gpu, as_json=options.json)


if __name__ == "__main__":
    main()
