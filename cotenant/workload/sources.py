"""Generate arrival times by sources of requests, which are values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import CHUNK, Floats, Times

# Segments in which a rate is linear: starts and lengths in seconds, first and last rates.
RateSegments = tuple[Floats, Floats, Floats, Floats]

_STAYS_PER_CHUNK = 512
_TINY = 1e-300
_MAX_RATE = 1e9  # requests/s: an hour would take a year to simulate
_MAX_BURST = 10_000_000  # requests at once: a few GiB


class Poisson(msgspec.Struct, frozen=True):
    """Generate Poisson arrivals. rate: mean requests/s."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, _gaps(1.0, rng))

    def scaled(self, factor: float) -> Poisson:
        return Poisson(self.rate * factor)


class Gamma(msgspec.Struct, frozen=True):
    """Draw gamma-distributed interarrival times. cv: their coefficient of variation; 1 is Poisson, above 1 bursty."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_cv(self.cv)

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, _gaps(self.cv, rng))

    def scaled(self, factor: float) -> Gamma:
        return Gamma(self.rate * factor, self.cv)


class Uniform(msgspec.Struct, frozen=True):
    """Send evenly spaced requests, one every 1/rate seconds, at a random phase."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        phase = rng.random()
        gaps = np.ones(CHUNK)
        return _renewal(self.rate, lambda: gaps, first=phase - 1)

    def scaled(self, factor: float) -> Uniform:
        return Uniform(self.rate * factor)


class MarkovModulated(msgspec.Struct, frozen=True):
    """Generate lasting bursts by a Markov-modulated Poisson process.

    In state n, requests arrive at `rates[n]` per second. It stays for an exponential time of mean `stays[n]` seconds,
    and then moves to any other state with equal probability.
    """

    rates: tuple[float, ...]
    stays: tuple[float, ...]

    def __post_init__(self) -> None:
        for rate in self.rates:
            _check_rate(rate)
        if not self.rates or len(self.rates) != len(self.stays):
            raise ConfigError(f"{len(self.rates)} rates and {len(self.stays)} stays; give one stay for each rate")
        if not all(math.isfinite(stay) and stay > 0 for stay in self.stays):
            raise ConfigError(f"stays of {_join(self.stays)} s; all must be above 0")

    @property
    def rate(self) -> float:
        # All transitions are equally likely, so all states are entered equally often.
        return sum(rate * stay for rate, stay in zip(self.rates, self.stays, strict=True)) / sum(self.stays)

    def times(self, rng: np.random.Generator) -> Times:
        return _time_changed(_gaps(1.0, rng), self._segments(rng)) if any(self.rates) else iter(())

    def _segments(self, rng: np.random.Generator) -> Iterator[RateSegments]:
        states, rates, stays = len(self.rates), np.array(self.rates), np.array(self.stays)
        state = int(rng.choice(states, p=stays / stays.sum()))
        start = 0.0
        while True:
            steps = rng.integers(1, states, _STAYS_PER_CHUNK) if states > 1 else np.zeros(_STAYS_PER_CHUNK, np.int64)
            visited = (state + np.concatenate([[0], np.cumsum(steps)])) % states
            lengths = rng.exponential(stays[visited[:-1]])
            ends = start + np.cumsum(lengths)
            rate = rates[visited[:-1]]
            yield ends - lengths, lengths, rate, rate
            state, start = int(visited[-1]), float(ends[-1])

    def scaled(self, factor: float) -> MarkovModulated:
        return MarkovModulated(tuple(rate * factor for rate in self.rates), self.stays)


class Curve(msgspec.Struct, frozen=True):
    """Follow a rate that changes over time, linear between points.

    points: (seconds, requests/s), in the order of time from 0 on; two at the same time make a step. The last rate
    stays, unless the curve repeats (`repeat`). cv: of interarrival times as in `Gamma`, in operational time, which runs
    in proportion to the rate; 1 is Poisson.
    """

    points: tuple[tuple[float, float], ...]
    repeat: bool = False
    cv: float = 1.0

    def __post_init__(self) -> None:
        for _, rate in self.points:
            _check_rate(rate)
        times = [time for time, _ in self.points]
        if not times or times[0] != 0:
            raise ConfigError("a curve begins at 0 s; give the rate there")
        for before, after in pairwise(times):
            if not before <= after < math.inf:
                raise ConfigError(f"a curve goes from {before:g} s to {after:g} s; points go in the order of time")
        if self.repeat and times[-1] == 0:
            raise ConfigError("a curve that repeats must last longer than 0 s")
        _check_cv(self.cv)

    @classmethod
    def steps(cls, rates: Iterable[float], width: float, *, repeat: bool = False) -> Curve:
        """Return a curve with each rate for `width` seconds, and then 0, or repeated."""
        if not width > 0:
            raise ConfigError(f"steps of {width:g} s; use more than 0")
        corners = [(n * width, (n + 1) * width, rate) for n, rate in enumerate(rates)]
        points = [point for start, end, rate in corners for point in ((start, rate), (end, rate))]
        return cls(tuple(points if repeat or not points else [*points, (points[-1][0], 0.0)]) or ((0.0, 0.0),), repeat)

    @property
    def rate(self) -> float:
        """The mean from the first point to the last."""
        length, last = self.points[-1]
        area = sum((t1 - t0) * (r0 + r1) / 2 for (t0, r0), (t1, r1) in pairwise(self.points))
        return area / length if length else last

    def at(self, time: float) -> float:
        """Return the rate at a time; at a step, the one after it."""
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
        cycle = times[:-1], np.diff(times), rates[:-1], rates[1:]
        if self.repeat:
            return _time_changed_cycles(gaps, cycle) if self.rate else iter(())
        if not rates[-1]:
            return _time_changed(gaps, [cycle]) if self.rate else iter(())
        return _time_changed(gaps, [cycle, (times[-1:], np.array([math.inf]), rates[-1:], rates[-1:])])

    def scaled(self, factor: float) -> Curve:
        return Curve(tuple((time, rate * factor) for time, rate in self.points), self.repeat, self.cv)


class ClosedLoop(msgspec.Struct, frozen=True):
    """Simulate callers who each wait for the response and a think time before the next query.

    think: mean seconds, exponential. samples: requests in one query; a caller waits for all of them. `times` are those
    of the first queries: the rest depend on the responses.
    """

    callers: int
    think: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        _check_count(self.callers)
        if not (math.isfinite(self.think) and self.think >= 0):
            raise ConfigError(f"a think time of {self.think:g} s must be finite and at least 0")
        if self.samples < 1:
            raise ConfigError(f"queries of {self.samples} samples must have at least 1")
        _check_count(self.callers * self.samples)

    @property
    def rate(self) -> None:
        return None

    def times(self, rng: np.random.Generator) -> Times:
        first = np.sort(rng.exponential(self.think, self.callers)) if self.think else np.zeros(self.callers)
        return iter([np.repeat(first, self.samples)])

    def scaled(self, factor: float) -> ClosedLoop:
        """Return the nearest whole number of callers, at least one where there are any."""
        callers = self.callers * factor
        return msgspec.structs.replace(self, callers=max(_check_count(callers), 1 if callers else 0))


class Offline(msgspec.Struct, frozen=True):
    """Send a number of requests, all at the beginning."""

    samples: int

    def __post_init__(self) -> None:
        _check_count(self.samples)

    @property
    def rate(self) -> None:
        return None

    def times(self, rng: np.random.Generator) -> Times:
        return iter([np.zeros(self.samples)])

    def scaled(self, factor: float) -> Offline:
        return Offline(_check_count(self.samples * factor))


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"a rate of {rate:g} requests/s must be finite and at least 0")
    if rate > _MAX_RATE:
        raise ConfigError(f"a rate of {rate:g} requests/s is too high to simulate; at most {_MAX_RATE:g}")


def _check_count(number: float) -> int:
    if not 0 <= number <= _MAX_BURST:
        raise ConfigError(f"{number:g} callers or samples; use 0 to {_MAX_BURST:,}")
    return round(number)


def _check_cv(cv: float) -> None:
    if not (math.isfinite(cv) and cv > 0):
        raise ConfigError(f"cv {cv:g} of the gaps between arrivals must be above 0")


def _join(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _gaps(cv: float, rng: np.random.Generator) -> Callable[[], Floats]:
    """Return a generator of interarrival times with mean 1."""
    if cv == 1:
        return lambda: rng.standard_exponential(CHUNK)
    return lambda: rng.gamma(cv**-2, cv**2, CHUNK)


def _time_changed(gaps: Callable[[], Floats], segments: Iterable[RateSegments]) -> Times:
    """Yield arrivals of a process with gaps of mean 1 in operational time, which is the integral of the rate."""
    target_areas = np.cumsum(gaps())
    start = 0.0  # the integral up to the segment
    for segment in segments:
        end = start + _area(segment)
        while reached := int(np.searchsorted(target_areas, end)):
            yield np.maximum.accumulate(_inverse_area(target_areas[:reached] - start, segment))
            target_areas = (
                target_areas[reached:] if reached < target_areas.size else target_areas[-1] + np.cumsum(gaps())
            )
        start = end


def _time_changed_cycles(gaps: Callable[[], Floats], cycle: RateSegments) -> Times:
    """Yield the same with one cycle repeated endlessly."""
    area, length = _area(cycle), float(cycle[1].sum())
    last = 0.0
    while True:
        target_areas = last + np.cumsum(gaps())
        last = float(target_areas[-1])
        cycles, rest = np.divmod(target_areas, area)
        yield np.maximum.accumulate(cycles * length + _inverse_area(rest, cycle))


def _area(segment: RateSegments) -> float:
    _, lengths, first, last = segment
    return float((lengths * (first + last) / 2).sum())


def _inverse_area(area: Floats, segment: RateSegments) -> Floats:
    """Return the times at which the integral of a segment's rates reaches some values below its total."""
    starts, lengths, first, last = segment
    areas = np.cumsum(lengths * (first + last) / 2)
    slopes = np.divide(last - first, lengths, out=np.zeros(lengths.size), where=lengths > 0)
    index = np.minimum(np.searchsorted(areas, area, side="right"), areas.size - 1)
    area_within = area - np.where(index > 0, areas[index - 1], 0.0)
    # Solve r t + s t² / 2 = area_within without cancellation and for slopes of 0. Rounding may put the last into a
    # segment of rate 0: clip it to its length.
    root = np.sqrt(np.maximum(first[index] ** 2 + 2 * slopes[index] * area_within, 0.0))
    offset = np.minimum(2 * area_within / np.maximum(first[index] + root, _TINY), lengths[index])
    return starts[index] + offset


def _renewal(rate: float, gaps: Callable[[], Floats], first: float = 0.0) -> Times:
    """Yield a renewal process; gaps and `first`, the origin of the first gap, are in units of 1/rate."""
    if not rate:
        return
    last = first / rate
    while True:
        times = last + np.cumsum(gaps()) / rate
        last = float(times[-1])
        yield times
