"""Read workload files: arrival processes and traces by model, and failures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cotenant.config.toml import decode_toml, explain_error, nearest_hint, read_text
from cotenant.core import units
from cotenant.core.identity import parse_identity
from cotenant.errors import ConfigError
from cotenant.workload import Source, Workload
from cotenant.workload.arrivals import Floats
from cotenant.workload.failures import NOTICED, Failure
from cotenant.workload.mlperf import SAMPLES_PER_QUERY
from cotenant.workload.shapes import hills, wave
from cotenant.workload.sources import ClosedLoop, Curve, Gamma, MarkovModulated, Offline, Poisson, Uniform
from cotenant.workload.traces import MINUTE, Trace, TraceSource, TraceSummary, read_headings, read_minutes

Duration = str | int | float


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold the keys that every entry may have."""

    model: str
    arrivals: str = "poisson"
    timeout: Duration | None = None
    scale: float = 1.0


class _Rate(_Entry, kw_only=True):
    rate: float


class _Gamma(_Rate, kw_only=True):
    cv: float


class _Modulated(_Entry, kw_only=True):
    rates: list[float]
    stays: list[Duration]


class _Curve(_Entry, kw_only=True):
    points: list[tuple[Duration, float]]
    repeat: bool = False
    cv: float = 1.0


class _Steps(_Entry, kw_only=True):
    rates: list[float]
    every: Duration
    repeat: bool = False


class _Wave(_Entry, kw_only=True):
    low: float
    high: float
    period: Duration


class _Hills(_Entry, kw_only=True):
    low: float
    peaks: list[tuple[Duration, Duration, float]]


class _Minutes(_Entry, kw_only=True):
    file: str
    names: list[str] | None = None
    key: str = "HashFunction"
    rate: float | None = None
    repeat: bool = False


class _Times(_Entry, kw_only=True):
    file: str
    column: str | int
    key: str | int | None = None
    names: list[str] | None = None
    unit: Duration = "1s"
    gap: Duration = "1h"
    rate: float | None = None
    speed: float = 1.0


class _Closed(_Entry, kw_only=True):
    callers: int
    think: Duration = "0s"
    samples: int = 1


class _Samples(_Entry, kw_only=True):
    samples: int


class _MultiStream(_Entry, kw_only=True):
    samples: int = SAMPLES_PER_QUERY


class _FailureEntry(msgspec.Struct, forbid_unknown_fields=True):
    time: Duration
    parts: list[str] = []
    nodes: list[str] = []
    back: Duration | None = None
    noticed: Duration | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    workload: list[dict[str, Any]]
    scale: float = 1.0
    failures: list[_FailureEntry] = []


_ENTRIES: dict[str, type[_Entry]] = {
    "poisson": _Rate,
    "gamma": _Gamma,
    "uniform": _Rate,
    "modulated": _Modulated,
    "curve": _Curve,
    "steps": _Steps,
    "wave": _Wave,
    "hills": _Hills,
    "minutes": _Minutes,
    "times": _Times,
    "closed": _Closed,
    "single_stream": _Entry,
    "multi_stream": _MultiStream,
    "server": _Rate,
    "offline": _Samples,
}
MODEL = "model"  # the column of a trace that needs no other file
_ALL = ""  # the name of all rows together
# MLPerf's scenarios that know no target.
_PATIENT = ("single_stream", "multi_stream", "offline")


def read_workload(path: Path | str, names: Collection[str]) -> Workload:
    """Read a workload from a TOML file; traces are relative to it. names: the models and applications that exist.

    Or from a trace alone, a CSV file in which a column `model` names what was asked for. Raises ConfigError with the
    file, the entry and the way out; a trace is read through once to see that it is sound.
    """
    path = Path(path)
    if path.suffix == ".csv":
        return _traced(path, names)
    file = decode_toml(read_text(path), _File, path)
    entries = []
    for index, table in enumerate(file.workload):
        with _at(f"{path}: workload[{index}]"):
            entry = _entry(table)
            if isinstance(entry, _Minutes | _Times) and entry.names == []:
                raise ConfigError("names: none; leave it out to use all, or leave out the entry to use none")
            entries.append(entry)
    traces = _Traces(path.parent, entries)
    sources: dict[str, Source] = {}
    timeouts: dict[str, float] = {}
    for index, entry in enumerate(entries):
        with _at(f"{path}: workload[{index}]"):
            if entry.model not in names:
                raise ConfigError(f"model {entry.model!r} is unknown; {nearest_hint(entry.model, names)}")
            if entry.model in sources:
                raise ConfigError(f"model {entry.model!r} appears twice; keep one entry")
            sources[entry.model] = _source(entry, traces).scaled(entry.scale * file.scale)
            timeouts |= {entry.model: timeout} if (timeout := _timeout(entry)) is not None else {}
    return Workload(sources, timeouts)


def read_failures(path: Path | str) -> tuple[Failure, ...]:
    """Read the failures of a workload file. Raises ConfigError."""
    path = Path(path)
    if path.suffix == ".csv":
        return ()
    file = decode_toml(read_text(path), _File, path)
    failures = []
    for index, entry in enumerate(file.failures):
        with _at(f"{path}: failures[{index}]"):
            back = math.inf if entry.back is None else _seconds(entry.back, "back")
            parts = tuple(parse_identity(part) for part in entry.parts)
            if entry.noticed is not None and not entry.nodes:
                raise ConfigError("noticed: it applies to nodes, and none are named; leave it out")
            failures.append(
                Failure(
                    parts=parts,
                    nodes=tuple(entry.nodes),
                    time=_seconds(entry.time, "time"),
                    back=back,
                    noticed=NOTICED if entry.noticed is None else _seconds(entry.noticed, "noticed"),
                )
            )
    return tuple(failures)


def _traced(path: Path, names: Collection[str]) -> Workload:
    """Read a CSV trace: requests per minute in columns 1, 2, …, or a row per request with its time."""
    known = read_headings(path)
    if MODEL not in known:
        raise ConfigError(
            f"{path}:1: no column {MODEL!r} says what was asked for; available: {', '.join(known) or 'none'}. A"
            " workload file can name the model instead, with arrivals = 'times' or 'minutes'"
        )
    others = [heading for heading in known if heading != MODEL]
    if not others:
        raise ConfigError(f"{path}:1: no column of times, or of minutes headed 1, 2, …, is next to {MODEL!r}")
    sources: dict[str, Source] = {}
    if all(heading.strip().isdigit() for heading in others):
        rates: dict[str, Floats] = {}
        for name, row in read_minutes(path, MODEL):
            rates[name] = rates[name] + row if name in rates else row
        sources |= {name: Curve.steps(row.tolist(), MINUTE) for name, row in rates.items()}
    else:
        trace = Trace(file=path, column=others[0], key=MODEL)
        summary = TraceSummary.of(trace)
        sources |= {name: TraceSource(trace=trace, summary=summary, names=frozenset([name])) for name in summary.counts}
    for name in sources:
        if name not in names:
            raise ConfigError(f"{path}: model {name!r} is unknown; {nearest_hint(name, names)}")
    return Workload(sources)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Prefix errors inside with their place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


class _Traces:
    """Read each trace once, however many entries use a part of it. base: folder that files are relative to.

    entries: all there are, so that of what counts minutes only the names are kept that somebody asks for.
    """

    def __init__(self, base: Path, entries: list[_Entry]) -> None:
        self._base = base
        self._names = {name for entry in entries if isinstance(entry, _Minutes) for name in entry.names or ()}
        self._surveys: dict[Trace, TraceSummary] = {}
        self._minutes: dict[tuple[str, str], dict[str, Floats]] = {}

    def minutes(self, entry: _Minutes) -> Curve:
        rates = self._minutes.get((entry.file, entry.key))
        if rates is None:
            rates = self._minutes[entry.file, entry.key] = self._counted(self._base / entry.file, entry.key)
        names = (_ALL,) if entry.names is None else entry.names
        for name in names:
            if name not in rates:
                raise ConfigError(f"names: nothing in {entry.file} is called {name!r}")
        return Curve.steps(sum((rates[name] for name in names), np.zeros(1)).tolist(), MINUTE, repeat=entry.repeat)

    def _counted(self, file: Path, key: str) -> dict[str, Floats]:
        """Return requests/s in each minute, for the names that entries use and for all together."""
        rates: dict[str, Floats] = {}
        for name, row in read_minutes(file, key):
            for kept in (name, _ALL) if name in self._names else (_ALL,):
                rates[kept] = rates[kept] + row if kept in rates else row
        if not rates:
            raise ConfigError(f"{file}: no row is in it")
        return rates

    def times(self, entry: _Times) -> TraceSource:
        if entry.names is not None and entry.key is None:
            raise ConfigError("names without a key; set `key` to the column that holds them")
        unit, gap = _seconds(entry.unit, "unit"), _seconds(entry.gap, "gap")
        trace = Trace(file=self._base / entry.file, column=entry.column, key=entry.key, unit=unit, gap=gap)
        summary = self._surveys[trace] = self._surveys.get(trace) or TraceSummary.of(trace)
        return TraceSource(trace=trace, summary=summary, names=frozenset(entry.names or ()), speed=entry.speed)


def _entry(table: dict[str, Any]) -> _Entry:
    arrivals = table.get("arrivals", "poisson")
    if not isinstance(arrivals, str) or arrivals not in _ENTRIES:
        raise ConfigError(f"arrivals {arrivals!r} are unknown; {nearest_hint(str(arrivals), _ENTRIES)}")
    try:
        return msgspec.convert(table, _ENTRIES[arrivals])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{explain_error(error, _ENTRIES[arrivals])} (arrivals = {arrivals!r})") from None


def _source(entry: _Entry, traces: _Traces) -> Source:
    match entry:
        case _Gamma(rate=rate, cv=cv):
            return Gamma(rate, cv)
        case _Rate(rate=rate):
            return Uniform(rate) if entry.arrivals == "uniform" else Poisson(rate)
        case _Modulated(rates=rates, stays=stays):
            return MarkovModulated(tuple(rates), tuple(_seconds(stay, "stays") for stay in stays))
        case _Curve(points=points, repeat=repeat, cv=cv):
            return Curve(tuple((_seconds(time, "points"), rate) for time, rate in points), repeat, cv)
        case _Steps(rates=rates, every=every, repeat=repeat):
            return Curve.steps(rates, _seconds(every, "every"), repeat=repeat)
        case _Wave(low=low, high=high, period=period):
            return wave(low, high, _seconds(period, "period"))
        case _Hills(low=low, peaks=peaks):
            return hills(low, [(_seconds(start, "peaks"), _seconds(end, "peaks"), peak) for start, end, peak in peaks])
        case _Minutes():
            return _around(entry.rate, traces.minutes(entry))
        case _Times():
            return _around(entry.rate, traces.times(entry))
        case _Closed(callers=callers, think=think, samples=samples):
            return ClosedLoop(callers, _seconds(think, "think"), samples)
        case _MultiStream(samples=samples):
            return ClosedLoop(1, samples=samples)
        case _Samples(samples=samples):
            return Offline(samples)
    return ClosedLoop(1)  # single stream


def _around(rate: float | None, source: Source) -> Source:
    """Rescale a source to another mean rate."""
    if rate is None:
        return source
    if not source.rate:
        raise ConfigError(f"rate: the trace has no requests, and no multiple of that makes {rate:g} requests/s")
    return source.scaled(rate / source.rate)


def _timeout(entry: _Entry) -> float | None:
    if entry.timeout is None:
        return math.inf if entry.arrivals in _PATIENT else None
    if entry.timeout == "never":
        return math.inf
    seconds = _seconds(entry.timeout, "timeout")
    if not seconds:
        raise ConfigError(f"timeout: {entry.timeout!r} must be above 0")
    return seconds


def _seconds(duration: Duration, key: str) -> float:
    return units.parse_seconds(str(duration), key)
