"""The largest rates of groups of models, way by way: Figures 6 and 17."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from cotenant.core.application import Application
from experiments.gpulet import paper
from experiments.gpulet.model_sets import Cast, cast
from experiments.gpulet.systems import Serves, Way, serves
from experiments.parallel import Options, spread
from experiments.plotting import Bar

MEAN = "mean"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Models that are asked for together. mix: how much of each; roles, targets: as in Cast.playing, where not its own.

    cast, way: with whose profiles, and who schedules. application: what asks for them, once for one of each of the mix;
    the targets are then parts of its own.
    """

    name: str
    cast: str
    way: Way
    mix: dict[str, float]
    roles: dict[str, str] = {}
    targets: dict[str, float] = {}
    devices: int = paper.DEVICES
    application: Application | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """rate: requests/s of the group in all. relative: over the base's. paper: the same there, which is a mean."""

    profiles: str
    group: str
    way: str
    who: str
    rate: float | None
    relative: float | None
    paper: float | None = None


def compared(groups: Sequence[Group], base: Way | None, in_paper: Mapping[str, float], options: Options) -> list[Row]:
    """A row for each group, and the mean of each way. base: to whom all are compared; None: to each one's own ideal."""
    for name in {group.cast for group in groups}:
        cast(name)  # what is absent is an error here, before processes start
    rates = spread(largest_rate, groups, options, "largest rates")
    bases = {
        (group.cast, group.name, group.way.who): rate
        for group, rate in zip(groups, rates, strict=True)
        if (group.way == base if base else group.way.name == "ideal")
    }
    rows = []
    for group, rate in zip(groups, rates, strict=True):
        of = bases.get((group.cast, group.name, base.who if base else group.way.who))
        rows.append(
            Row(
                profiles=group.cast,
                group=group.name,
                way=group.way.name,
                who=group.way.who,
                rate=rate,
                relative=rate / of if of else None,
            )
        )
    return rows + _means(rows, in_paper)


def _means(rows: Sequence[Row], in_paper: Mapping[str, float]) -> list[Row]:
    found = means((row.profiles, row.way, row.who, row.relative) for row in rows)
    return [
        Row(profiles=profiles, group=MEAN, way=way, who=who, rate=None, relative=mean, paper=in_paper.get(way))
        for (profiles, way, who), mean in found.items()
    ]


def means(numbers: Iterable[tuple[str, str, str, float | None]]) -> dict[tuple[str, str, str], float]:
    """Of numbers by profiles, way and who, where they are known."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for profiles, way, who, number in numbers:
        if number is not None:
            found.setdefault((profiles, way, who), []).append(number)
    return {key: fmean(values) for key, values in found.items()}


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The means, for a plot."""
    return [
        Bar("", row.profiles, row.way, row.who, row.relative)
        for row in rows
        if row.group == MEAN and row.relative is not None
    ]


def largest_rate(group: Group) -> float:
    """Requests/s of the whole group, at most."""
    its = players(group)
    return largest(serves(group.way, its, group.devices), group.mix, its.units[0]) * math.fsum(group.mix.values())


def players(group: Group) -> Cast:
    its = cast(group.cast)
    return its.playing(group.roles, group.targets) if group.roles else its


def largest(serves: Serves, mix: Mapping[str, float], start: float, *, beyond: bool = False) -> float:
    """The largest x, to 0.5 %, at which x times the mix is served, by bisection from `start` on; 0 where none is.

    beyond: half as much again is looked at from above in steps of 2 %, for those who serve a rate and not a lower one:
    the published scripts look from above, too.
    """

    def works(x: float) -> bool:
        return serves({role: weight * x for role, weight in mix.items()})

    def between(low: float, high: float) -> float:
        while high - low > 0.005 * low and high > start / 1000:
            middle = (low + high) / 2
            low, high = (middle, high) if works(middle) else (low, middle)
        return low

    low, high = 0.0, start
    while works(high):
        low, high = high, 2 * high
    low = between(low, high)
    for percent in range(50, 0, -2) if beyond and low else ():
        if works(low * (1 + percent / 100)):
            return between(low * (1 + percent / 100), low * (1 + percent / 100 + 0.02))
    return low
