"""Read public traces: request counts per minute, and the times of single requests.

Counts are in the format of the Azure Functions trace of 2019 (Shahrad et al., ATC 2020): columns that name a function,
then one for each minute, headed 1, 2, … Times are a column of any CSV file, as in the Azure Functions trace of 2021
(``end_timestamp``, seconds), the Azure LLM traces (``TIMESTAMP``, date and time), or a list of tweets (``created_at``).
The traces themselves are not part of this project.

Files are streamed. One with times is read through once for validation, and again during the run.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from itertools import islice
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import CHUNK, Floats, Times

MINUTE = 60.0
TWITTER_FORMAT = "%a %b %d %H:%M:%S %z %Y"  # as in "Wed Oct 10 20:19:24 +0000 2018"


def read_headings(file: Path) -> list[str]:
    """Read the column headings. Raises ConfigError where the file cannot be read."""
    return next(_rows(file), [])


def read_minutes(file: Path, column: str = "HashFunction") -> Iterator[tuple[str, Floats]]:
    """Yield requests/s in each minute, row by row, with the name in `column`; a name may occur in several rows.

    Minutes are headed by their numbers, as in Azure's files (``1``) or in samples of them (``minute_1``). Raises
    ConfigError with the file and the line.
    """
    rows = _rows(file)
    header = next(rows, [])
    numbers = {index: number for index, heading in enumerate(header) if (number := _minute(heading)) is not None}
    minutes = list(numbers)
    name = _index(column, header, file)
    if not minutes:
        raise ConfigError(f"{file}:1: no column is headed by the number of a minute: 1, 2, …")
    for due, index in enumerate(minutes, numbers[minutes[0]]):
        if numbers[index] != due:
            raise ConfigError(f"{file}:1: minute {due} is missing: a column {header[index].strip()} is in its place")
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ConfigError(f"{file}:{line}: {len(row)} cells where the header names {len(header)}")
        counts = np.array([_count(row[index]) for index in minutes])
        if not (counts >= 0).all():
            minute, text = next((numbers[i], row[i]) for i in minutes if not _count(row[i]) >= 0)
            raise ConfigError(f"{file}:{line}: minute {minute}: {text!r} is not a number of 0 or more")
        yield row[name], counts / MINUTE


def _minute(heading: str) -> int | None:
    """Return the number of the minute that a heading names; None where it names none."""
    text = heading.strip().removeprefix("minute_")
    return int(text) if text.isdigit() else None


def _count(text: str) -> float:
    """Parse a count of requests; nan if it is none."""
    try:
        count = float(text)
    except ValueError:
        return math.nan
    return count if count < math.inf else math.nan


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Read a CSV file with a row for each request, in the order of time.

    column: of the time: in seconds (or `unit` of them), as a date and time (UTC unless it has a zone), or in Twitter's
    format. key: column of the requested name, if any. Both are a heading, or the number of a column (from 1) in a file
    without a header. gap: seconds without any request beyond which part of the file is assumed missing.
    """

    file: Path
    column: str | int
    key: str | int | None = None
    unit: float = 1.0
    gap: float = 3600.0

    def read(self) -> Iterator[tuple[Floats, list[str]]]:
        """Yield times in seconds and names (empty without a key), some thousands of rows at a time.

        Raises ConfigError with the file and the line for invalid rows.
        """
        rows = _rows(self.file)
        line, column, key = self._columns(rows)
        last = -math.inf
        seconds: Callable[[str], float] | None = None
        while chunk := list(islice(rows, CHUNK)):
            try:
                seconds = seconds or _time_parser(chunk[0][column])
                times = self._times(chunk, column, seconds)
                names = [] if key is None else [row[key] for row in chunk]
            except (IndexError, ValueError):
                raise self._unreadable(chunk, line, max(column, key or 0), column, seconds) from None
            steps = np.diff(times, prepend=last if math.isfinite(last) else times[0])
            invalid = np.flatnonzero(~(steps >= 0) | (steps > self.gap))
            if invalid.size:
                raise self._broken(line + int(invalid[0]), float(steps[invalid[0]]))
            last = float(times[-1])
            line += len(chunk)
            yield times, names

    def times_of(self, names: Collection[str] = ()) -> Times:
        """Yield the times of some names, or of all, from a validated file. Raises ConfigError if it has changed."""
        rows = _rows(self.file)
        _, column, key = self._columns(rows)
        seconds: Callable[[str], float] | None = None
        while chunk := list(islice(rows, CHUNK)):
            try:
                seconds = seconds or _time_parser(chunk[0][column])
                chosen = chunk if key is None or not names else [row for row in chunk if row[key] in names]
                times = self._times(chosen, column, seconds)
            except (IndexError, ValueError):
                raise ConfigError(f"{self.file}: it has changed since it was first read; start again") from None
            yield times

    def _columns(self, rows: Iterator[list[str]]) -> tuple[int, int, int | None]:
        """Return the line of the first request, and the columns of time and name, from 0; consumes the header."""
        header = [] if isinstance(self.column, int) else next(rows, [])
        key = None if self.key is None else _index(self.key, header, self.file)
        return 2 if header else 1, _index(self.column, header, self.file), key

    def _times(self, rows: list[list[str]], column: int, seconds: Callable[[str], float]) -> Floats:
        return np.array(list(map(seconds, map(itemgetter(column), rows))), np.float64) * self.unit

    def _unreadable(
        self, chunk: list[list[str]], line: int, cells: int, column: int, seconds: Callable[[str], float] | None
    ) -> ConfigError:
        for number, row in enumerate(chunk, line):
            if len(row) <= cells:
                return ConfigError(f"{self.file}:{number}: {len(row)} cells; column {cells + 1} is missing")
            try:
                (seconds or _time_parser)(row[column])
            except ValueError:
                what = (
                    "neither a number nor a date and time"
                    if seconds is None
                    else "not a time in the format of those before it"
                )
                return ConfigError(f"{self.file}:{number}: {row[column]!r} is {what}")
        raise AssertionError(f"{self.file}: lines {line} on were not readable, and now they are")

    def _broken(self, line: int, step: float) -> ConfigError:
        if step > self.gap:
            return ConfigError(
                f"{self.file}:{line}: nothing for {step:,.0f} s before this line; put in what is missing, or allow"
                f" longer gaps than {self.gap:g} s"
            )
        if math.isnan(step):
            return ConfigError(f"{self.file}:{line}: a time is not a finite number")
        return ConfigError(f"{self.file}:{line}: time goes back by {-step:g} s; sort the file by time")


class TraceSummary(msgspec.Struct, frozen=True):
    """Summarise a trace.

    first, last: times in seconds; counts: requests by name (all under "" without a key).
    """

    first: float
    last: float
    counts: Counter[str]

    @classmethod
    def of(cls, trace: Trace) -> TraceSummary:
        """Read a trace through. Raises ConfigError, with the line, for an invalid one."""
        first, last = math.inf, -math.inf
        counts: Counter[str] = Counter()
        for times, names in trace.read():
            first, last = min(first, float(times[0])), float(times[-1])
            if trace.key is None:
                counts[""] += times.size
            else:
                counts.update(names)
        if not counts:
            raise ConfigError(f"{trace.file}: it contains no request")
        return cls(first, last, counts)


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    """Replay the requests of a trace, at their times since its first request.

    names: of the requests to replay; all, where the trace has no key. factor: multiple of the requests: some are
    dropped, or repeated at a random time before the next. speed: factor on the speed of time.
    """

    trace: Trace
    summary: TraceSummary
    names: frozenset[str] = frozenset()
    factor: float = 1.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 0):
            raise ConfigError(f"a factor of {self.factor:g} on a trace's requests must be finite and at least 0")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"a trace's speed of {self.speed:g} must be finite and above 0")
        for name in sorted(self.names - self.summary.counts.keys()):
            names = [each for each, _ in self.summary.counts.most_common(5)]
            raise ConfigError(f"{self.trace.file}: no requests for {name!r}; most frequent are {', '.join(names)}")

    @property
    def rate(self) -> float:
        """The mean over the whole trace; 0 for one without duration."""
        counts = self.summary.counts
        count = sum(counts[name] for name in self.names) if self.names else counts.total()
        length = self.summary.last - self.summary.first
        return self.factor * self.speed * count / length if length else 0.0

    def times(self, rng: np.random.Generator) -> Times:
        pending = np.empty(0)
        for times in self.trace.times_of(self.names):
            pending = np.concatenate([pending, (times - self.summary.first) / self.speed])
            if pending.size > 1:
                yield self._thinned_or_repeated(pending, rng)
                pending = pending[-1:]
        if pending.size:
            yield self._thinned_or_repeated(np.append(pending, pending), rng)

    def scaled(self, factor: float) -> TraceSource:
        return msgspec.structs.replace(self, factor=self.factor * factor)

    def _thinned_or_repeated(self, times: Floats, rng: np.random.Generator) -> Floats:
        """Drop or repeat requests; the last time only limits the copies of the one before it."""
        if self.factor == 1:
            return times[:-1]
        whole, fraction = divmod(self.factor, 1.0)
        copies = int(whole) + (rng.random(times.size - 1) < fraction)
        start = np.repeat(times[:-1], copies)
        offsets = rng.random(start.size) * np.repeat(np.diff(times), copies)
        is_copy = np.diff(np.repeat(np.arange(copies.size), copies), prepend=-1) == 0
        return np.sort(np.where(is_copy, start + offsets, start))


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.reader(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8: {error.reason}; is it the right file?") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: is not CSV: {error}") from None


def _index(column: str | int, header: list[str], file: Path) -> int:
    """Return the index of a column, from 0."""
    if isinstance(column, int):
        if column < 1:
            raise ConfigError(f"{file}: column {column}; the first is 1")
        return column - 1
    if column not in header:
        raise ConfigError(f"{file}:1: column {column!r} is missing; available: {', '.join(header) or 'none'}")
    return header.index(column)


def _time_parser(example: str) -> Callable[[str], float]:
    """Return the parser of times in the format of an example. Raises ValueError for an unknown one."""
    for read in (float, _parse_iso, _parse_twitter):
        try:
            read(example)
        except ValueError:
            continue
        return read
    raise ValueError(example)


def _parse_iso(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _parse_twitter(text: str) -> float:
    return datetime.strptime(text, TWITTER_FORMAT).timestamp()
