"""Sources of requests, as values: each says when requests come, given a generator to draw from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import CHUNK, Floats, Times

# Stretches of time in which a rate goes in a straight line: starts and lengths in seconds, rates at first and at last.
Stretches = tuple[Floats, Floats, Floats, Floats]

_STAYS = 512
_TINY = 1e-300
_MOST = 1e9  # requests/s: an hour of them would take a year to simulate
_AT_ONCE = 10_000_000  # requests: a few GiB


class Poisson(msgspec.Struct, frozen=True):
    """Independent callers, `rate` a second on average."""

    rate: float

    def __post_init__(self) -> None:
        _known(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, _gaps(1.0, rng))

    def scaled(self, factor: float) -> Poisson:
        return Poisson(self.rate * factor)


class Gamma(msgspec.Struct, frozen=True):
    """Gaps from a gamma distribution. cv is their coefficient of variation: 1 is Poisson, above 1 comes in bursts."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _known(self.rate)
        _spread_known(self.cv)

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, _gaps(self.cv, rng))

    def scaled(self, factor: float) -> Gamma:
        return Gamma(self.rate * factor, self.cv)


class Uniform(msgspec.Struct, frozen=True):
    """One every 1/rate seconds, the first at a random moment within the first gap."""

    rate: float

    def __post_init__(self) -> None:
        _known(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        phase = rng.random()
        gaps = np.ones(CHUNK)
        return _renewal(self.rate, lambda: gaps, first=phase - 1)

    def scaled(self, factor: float) -> Uniform:
        return Uniform(self.rate * factor)


class MarkovModulated(msgspec.Struct, frozen=True):
    """Poisson at a rate that changes at random (a Markov-modulated Poisson process): bursts that last.

    In state n, requests come at `rates[n]` a second. It stays for an exponential time of `stays[n]` seconds on average,
    and then goes over to any other state, all alike.
    """

    rates: tuple[float, ...]
    stays: tuple[float, ...]

    def __post_init__(self) -> None:
        for rate in self.rates:
            _known(rate)
        if not self.rates or len(self.rates) != len(self.stays):
            raise ConfigError(f"{len(self.rates)} rates and {len(self.stays)} stays; give one stay for each rate")
        if not all(math.isfinite(stay) and stay > 0 for stay in self.stays):
            raise ConfigError(f"stays of {_listed(self.stays)} s; all must lie above 0")

    @property
    def rate(self) -> float:
        # From any state all others are next alike, so all are entered equally often.
        return sum(rate * stay for rate, stay in zip(self.rates, self.stays, strict=True)) / sum(self.stays)

    def times(self, rng: np.random.Generator) -> Times:
        return _warped(_gaps(1.0, rng), self._stretches(rng)) if any(self.rates) else iter(())

    def _stretches(self, rng: np.random.Generator) -> Iterator[Stretches]:
        states, rates, stays = len(self.rates), np.array(self.rates), np.array(self.stays)
        state = int(rng.choice(states, p=stays / stays.sum()))
        start = 0.0
        while True:
            steps = rng.integers(1, states, _STAYS) if states > 1 else np.zeros(_STAYS, np.int64)
            visited = (state + np.concatenate([[0], np.cumsum(steps)])) % states
            lengths = rng.exponential(stays[visited[:-1]])
            ends = start + np.cumsum(lengths)
            rate = rates[visited[:-1]]
            yield ends - lengths, lengths, rate, rate
            state, start = int(visited[-1]), float(ends[-1])

    def scaled(self, factor: float) -> MarkovModulated:
        return MarkovModulated(tuple(rate * factor for rate in self.rates), self.stays)


class Curve(msgspec.Struct, frozen=True):
    """A rate that changes over time, in straight lines from point to point.

    points: (seconds, requests/s), in the order of time from 0 on; two at the same time make a step. The last rate
    stays, unless the curve begins anew there (`repeat`). cv: as of `Gamma`, in a time that goes faster where the rate
    is higher; 1 is Poisson.
    """

    points: tuple[tuple[float, float], ...]
    repeat: bool = False
    cv: float = 1.0

    def __post_init__(self) -> None:
        for _, rate in self.points:
            _known(rate)
        times = [time for time, _ in self.points]
        if not times or times[0] != 0:
            raise ConfigError("a curve begins at 0 s; give the rate there")
        for before, after in pairwise(times):
            if not before <= after < math.inf:
                raise ConfigError(f"a curve goes from {before:g} s to {after:g} s; points go in the order of time")
        if self.repeat and times[-1] == 0:
            raise ConfigError("a curve that repeats must last longer than 0 s")
        _spread_known(self.cv)

    @classmethod
    def steps(cls, rates: Iterable[float], width: float, *, repeat: bool = False) -> Curve:
        """Each rate for `width` seconds, and then no more, or all anew."""
        if not width > 0:
            raise ConfigError(f"steps of {width:g} s; take more than 0")
        corners = [(n * width, (n + 1) * width, rate) for n, rate in enumerate(rates)]
        points = [point for start, end, rate in corners for point in ((start, rate), (end, rate))]
        return cls(tuple(points if repeat or not points else [*points, (points[-1][0], 0.0)]) or ((0.0, 0.0),), repeat)

    @property
    def rate(self) -> float:
        """From the first point to the last."""
        length, last = self.points[-1]
        area = sum((t1 - t0) * (r0 + r1) / 2 for (t0, r0), (t1, r1) in pairwise(self.points))
        return area / length if length else last

    def at(self, time: float) -> float:
        """The rate at a time; of a step, that after it."""
        last = self.points[-1][0]
        time = time % last if self.repeat else time
        if time >= last:
            return self.points[-1][1]
        index = int(np.searchsorted([t for t, _ in self.points], time, side="right"))
        (t0, r0), (t1, r1) = self.points[index - 1 : index + 1]
        return r0 + (r1 - r0) * (time - t0) / (t1 - t0)

    def times(self, rng: np.random.Generator) -> Times:
        gaps = _gaps(self.cv, rng)
        times, rates = (np.array(column, float) for column in zip(*self.points, strict=True))
        once = times[:-1], np.diff(times), rates[:-1], rates[1:]
        if self.repeat:
            return _rounds(gaps, once) if self.rate else iter(())
        if not rates[-1]:
            return _warped(gaps, [once]) if self.rate else iter(())
        return _warped(gaps, [once, (times[-1:], np.array([math.inf]), rates[-1:], rates[-1:])])

    def scaled(self, factor: float) -> Curve:
        return Curve(tuple((time, rate * factor) for time, rate in self.points), self.repeat, self.cv)


class ClosedLoop(msgspec.Struct, frozen=True):
    """So many callers, each of whom asks again only after the answer, and `think` seconds on average (exponential).

    samples: requests in one query; a caller waits for all of them. `times` are those of the first queries: the rest
    depends on the answers.
    """

    callers: int
    think: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        _whole(self.callers)
        if not (math.isfinite(self.think) and self.think >= 0):
            raise ConfigError(f"callers who think for {self.think:g} s; take 0 or more")
        if self.samples < 1:
            raise ConfigError(f"queries of {self.samples} samples; take 1 or more")
        _whole(self.callers * self.samples)

    @property
    def rate(self) -> None:
        return None

    def times(self, rng: np.random.Generator) -> Times:
        first = np.sort(rng.exponential(self.think, self.callers)) if self.think else np.zeros(self.callers)
        return iter([np.repeat(first, self.samples)])

    def scaled(self, factor: float) -> ClosedLoop:
        """As near to that as whole callers come, and at least one where there are any."""
        callers = self.callers * factor
        return msgspec.structs.replace(self, callers=max(_whole(callers), 1 if callers else 0))


class Offline(msgspec.Struct, frozen=True):
    """So many requests, all at the beginning."""

    samples: int

    def __post_init__(self) -> None:
        _whole(self.samples)

    @property
    def rate(self) -> None:
        return None

    def times(self, rng: np.random.Generator) -> Times:
        return iter([np.zeros(self.samples)])

    def scaled(self, factor: float) -> Offline:
        return Offline(_whole(self.samples * factor))


def _known(rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"a rate of {rate:g} requests/s is none; take 0 or more")
    if rate > _MOST:
        raise ConfigError(f"a rate of {rate:g} requests/s is more than can be simulated; take {_MOST:g} at most")


def _whole(number: float) -> int:
    if not 0 <= number <= _AT_ONCE:
        raise ConfigError(f"{number:g} callers or samples; take 0 to {_AT_ONCE:,}")
    return round(number)


def _spread_known(cv: float) -> None:
    if not (math.isfinite(cv) and cv > 0):
        raise ConfigError(f"cv {cv:g} of the gaps between arrivals must lie above 0")


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _gaps(cv: float, rng: np.random.Generator) -> Callable[[], Floats]:
    """Gaps of mean 1."""
    if cv == 1:
        return lambda: rng.standard_exponential(CHUNK)
    return lambda: rng.gamma(cv**-2, cv**2, CHUNK)


def _warped(gaps: Callable[[], Floats], blocks: Iterable[Stretches]) -> Times:
    """The arrivals of a process with gaps of mean 1, each when the area under the rates has come to as much."""
    due = np.cumsum(gaps())
    start = 0.0  # the area up to the block
    for block in blocks:
        end = start + _area(block)
        while reached := int(np.searchsorted(due, end)):
            yield np.maximum.accumulate(_when(due[:reached] - start, block))
            due = due[reached:] if reached < due.size else due[-1] + np.cumsum(gaps())
        start = end


def _rounds(gaps: Callable[[], Floats], once: Stretches) -> Times:
    """The same with one block over and over."""
    area, length = _area(once), float(once[1].sum())
    last = 0.0
    while True:
        due = last + np.cumsum(gaps())
        last = float(due[-1])
        rounds, rest = np.divmod(due, area)
        yield np.maximum.accumulate(rounds * length + _when(rest, once))


def _area(block: Stretches) -> float:
    _, lengths, first, last = block
    return float((lengths * (first + last) / 2).sum())


def _when(area: Floats, block: Stretches) -> Floats:
    """The times at which the area under a block's rates has come to so much, each less than the whole."""
    starts, lengths, first, last = block
    areas = np.cumsum(lengths * (first + last) / 2)
    slopes = np.divide(last - first, lengths, out=np.zeros(lengths.size), where=lengths > 0)
    index = np.minimum(np.searchsorted(areas, area, side="right"), areas.size - 1)
    ahead = area - np.where(index > 0, areas[index - 1], 0.0)
    # r t + s t² / 2 = ahead, in the form that holds for slopes of 0 and does not cancel. Rounding may put the last into
    # a stretch where nothing is due: it stays within that.
    root = np.sqrt(np.maximum(first[index] ** 2 + 2 * slopes[index] * ahead, 0.0))
    offset = np.minimum(2 * ahead / np.maximum(first[index] + root, _TINY), lengths[index])
    return starts[index] + offset


def _renewal(rate: float, gaps: Callable[[], Floats], first: float = 0.0) -> Times:
    """Gaps are in units of 1/rate; `first` is where the gap before the first arrival begins, in the same units."""
    if not rate:
        return
    last = first / rate
    while True:
        times = last + np.cumsum(gaps()) / rate
        last = float(times[-1])
        yield times
