"""Run the experiments of chapter 9: 20 and 40 pods, low and high objectives, four schedulers, over several seeds."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from experiments.data import miso
from experiments.parallel import Options
from experiments.thesis import matrices
from experiments.thesis.cluster import GPUS, OBJECTIVES, RANGE, Experiment, make_pods, simulate
from experiments.thesis.schedulers import SCHEDULERS, Pod

SCORE = "score"
COUNTS = (20, 40)  # pods
SEEDS = 20
PODS = len(OBJECTIVES) * sum(COUNTS)  # 120, of all experiments of one seed
LABELS = {"score": "score (the thesis')"}


class Setting(msgspec.Struct, frozen=True):
    """Say how the text is read. between: times what a workload reaches, objectives; relative: of `Matrices`."""

    name: str
    between: tuple[float, float] = RANGE
    relative: bool = False


TEXT = Setting("as the text has it")
RELATIVE = Setting("losses relative", relative=True)
IN_REACH = Setting("objectives of at most 1 ×", between=(0.8, 1.0))


class Case(msgspec.Struct, frozen=True):
    """Name one kind of experiment."""

    scheduler: str
    objectives: str
    pods: int


Experiments = dict[Case, tuple[Experiment, ...]]


def experiments(options: Options, setting: Setting = TEXT) -> Experiments:
    """Run all cases. every: of the 20 seeds, take one in so many."""
    return _experiments(tuple(range(options.seed, options.seed + SEEDS, options.every)), setting)


@functools.cache
def _experiments(seeds: tuple[int, ...], setting: Setting) -> Experiments:
    truth, known = (each(relative=setting.relative) for each in (matrices.measured, matrices.known))
    power = miso.power_curve()
    return {
        Case(scheduler, objectives, count): tuple(
            simulate(scheduler, _pods(seed, objectives, count, setting), truth, known, power, seed) for seed in seeds
        )
        for objectives in OBJECTIVES
        for count in COUNTS
        for scheduler in SCHEDULERS
    }


def _pods(seed: int, objectives: str, count: int, setting: Setting) -> list[Pod]:
    truth = matrices.measured(relative=setting.relative)
    return make_pods(count, objectives, truth, random.Random(seed), setting.between)  # noqa: S311


def differences(results: Sequence[Experiment]) -> list[float]:
    """Return achieved less objective over the objective, of all pods that ran."""
    return [outcome.difference for each in results for outcome in each.outcomes if outcome.difference is not None]


def distance(results: Sequence[Experiment]) -> float:
    """Return the mean of |achieved - objective| / objective."""
    return float(np.mean(np.abs(differences(results))))


def over_cases(of: Experiments, scheduler: str, value: Callable[[Experiment], float]) -> float:
    """Return the mean of a scheduler's experiments, each kind counting alike."""
    means = [np.mean([value(each) for each in found]) for case, found in of.items() if case.scheduler == scheduler]
    return float(np.mean(means))


def mean_distance(of: Experiments, scheduler: str) -> float:
    """Return the distance of a scheduler, the mean over its kinds of experiments."""
    return float(np.mean([distance(found) for case, found in of.items() if case.scheduler == scheduler]))


def nearest_alone(of: Experiments, *, met: bool) -> float:
    """Return the distance if each pod had, alone, the configuration that comes nearest to its objective, the mean over
    kinds of experiments. met: of those that meet it, where any does."""
    truth = matrices.measured()
    means = []
    for case, found in of.items():
        if case.scheduler == SCORE:
            pods = [outcome.pod for each in found for outcome in each.outcomes]
            means.append(np.mean([_nearest(pod, truth, met=met) for pod in pods]))
    return float(np.mean(means))


def _nearest(pod: Pod, truth: matrices.Matrices, *, met: bool) -> float:
    rates = [truth.alone(pod.workload, gpu, parts) for gpu in GPUS for parts in matrices.PARTS]
    off = [rate / pod.objective - 1 for rate in rates]
    enough = [each for each in off if each >= 0]
    return min(map(abs, enough if met and enough else off))
