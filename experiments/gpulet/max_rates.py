"""Find the largest rates of groups of models for each system (Figures 6 and 17)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from cotenant.core.application import Application
from experiments.gpulet import paper
from experiments.gpulet.model_sets import ModelSet, model_set
from experiments.gpulet.systems import Feasible, System, feasible
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar

MEAN = "mean"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Describe models that are requested together, and the system that schedules them.

    mix: relative rates by model; roles, targets: arguments of ModelSet.with_roles, if the models are not the set's own.
    model_set: whose profiles are used. application: if given, sends one request to each model of the mix; `targets` are
    then parts of its SLO.
    """

    name: str
    model_set: str
    system: System
    mix: dict[str, float]
    roles: dict[str, str] = {}
    targets: dict[str, float] = {}
    devices: int = paper.DEVICES
    application: Application | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result.

    rate: requests/s of the whole group; relative: over the baseline's; paper: the paper's mean of that.
    """

    profiles: str
    group: str
    system: str
    origin: str
    rate: float | None
    relative: float | None
    paper: float | None = None


def compare_rates(
    groups: Sequence[Group], base: System | None, in_paper: Mapping[str, float], options: Options
) -> list[Row]:
    """Return a row for each group and the mean of each system.

    base: the baseline; if None, the ideal of the same origin.
    """
    for name in {group.model_set for group in groups}:
        model_set(name)  # missing data is an error here, before processes start
    rates = run_tasks(largest_rate, groups, options, "largest rates")
    bases = {
        (group.model_set, group.name, group.system.origin): rate
        for group, rate in zip(groups, rates, strict=True)
        if (group.system == base if base else group.system.name == "ideal")
    }
    rows = []
    for group, rate in zip(groups, rates, strict=True):
        of = bases.get((group.model_set, group.name, base.origin if base else group.system.origin))
        rows.append(
            Row(
                profiles=group.model_set,
                group=group.name,
                system=group.system.name,
                origin=group.system.origin,
                rate=rate,
                relative=rate / of if of else None,
            )
        )
    return rows + _means(rows, in_paper)


def _means(rows: Sequence[Row], in_paper: Mapping[str, float]) -> list[Row]:
    """Return a row with the mean of each system."""
    found = means((row.profiles, row.system, row.origin, row.relative) for row in rows)
    return [
        Row(
            profiles=profiles,
            group=MEAN,
            system=system,
            origin=origin,
            rate=None,
            relative=mean,
            paper=in_paper.get(system),
        )
        for (profiles, system, origin), mean in found.items()
    ]


def means(numbers: Iterable[tuple[str, str, str, float | None]]) -> dict[tuple[str, str, str], float]:
    """Average numbers by profiles, system and origin; None is omitted."""
    by_key: dict[tuple[str, str, str], list[float]] = {}
    for profiles, system, origin, number in numbers:
        if number is not None:
            by_key.setdefault((profiles, system, origin), []).append(number)
    return {key: fmean(values) for key, values in by_key.items()}


def mean_bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the means."""
    return [
        Bar("", row.profiles, row.system, row.origin, row.relative)
        for row in rows
        if row.group == MEAN and row.relative is not None
    ]


def largest_rate(group: Group) -> float:
    """Return the largest rate of the whole group, in requests/s."""
    profiled_set = group_model_set(group)
    return largest_multiple(
        feasible(group.system, profiled_set, group.devices), group.mix, profiled_set.units[0]
    ) * math.fsum(group.mix.values())


def group_model_set(group: Group) -> ModelSet:
    """Return the group's models with their profiles and targets."""
    profiled_set = model_set(group.model_set)
    return profiled_set.with_roles(group.roles, group.targets) if group.roles else profiled_set


def largest_multiple(
    feasible: Feasible, mix: Mapping[str, float], start: float, *, search_above: bool = False
) -> float:
    """Find the largest feasible multiple of the mix to 0.5 %, by bisection from `start`; 0 if none is feasible.

    search_above: also try up to 50 % more, from above in steps of 2 %, for systems that serve a rate but not a lower
    one; the published scripts search from above, too.
    """

    def is_feasible(x: float) -> bool:
        return feasible({role: weight * x for role, weight in mix.items()})

    def between(low: float, high: float) -> float:
        while high - low > 0.005 * low and high > start / 1000:
            middle = (low + high) / 2
            low, high = (middle, high) if is_feasible(middle) else (low, middle)
        return low

    low, high = 0.0, start
    while is_feasible(high):
        low, high = high, 2 * high
    low = between(low, high)
    for percent in range(50, 0, -2) if search_above and low else ():
        if is_feasible(low * (1 + percent / 100)):
            return between(low * (1 + percent / 100), low * (1 + percent / 100 + 0.02))
    return low
