"""Interpolate profiles: measured latency and memory of a model on a kind of device.

Between measured points the latency is linear in the batch and linear in 1/share (work that scales plus work that does
not). Measurements are noisy, so the grid is first made monotone: more rows or a smaller share are never faster. Each
point counts as the isotonic regression of all of them, plus one standard deviation of the points around it, but never
as slower than the slowest point with fewer rows or more share. So a monotone profile counts as measured, and a slow
outlier does not make every larger batch and every smaller share as slow; `smoothed` tells what counts otherwise than
measured. Outside the grid nothing is predicted: below the smallest share, or above the largest batch, the latency is
`math.inf`.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.isotonic import isotonic_grid
from cotenant.core.units import parse_share as parse_share
from cotenant.core.units import show_count
from cotenant.errors import ConfigError

REQUIRED = ("model", "kind", "share_pct", "batch", "latency_ms", "memory_mib")
MIB = 1 << 20
FEATURE_HINT = "; further columns are features of a point, in numbers"
RAISED = 0.2  # fraction of a latency by which smoothing may raise it unsaid: noise raises small ones by as much
LOWERED = 0.02  # the same, by which it may be lower than measured
MIN_RESIDUAL = 1e-3  # relative difference from its regression from which a point is not on it
MAX_VALUE = 1e9  # seconds, and MiB
MAX_BATCH = 1 << 16  # a curve has an entry for each batch up to it
MAX_PROCS = 256  # workers of one model in one partition; MPS serves 48 clients, 60 on newer GPUs


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one measurement. share: ‰; latency: seconds for one batch; memory: bytes; features: further columns."""

    share: int
    batch: int
    latency: float
    memory: int
    procs: int = 1
    features: dict[str, float] = {}


class Profile:
    """Hold the profile of one model on one kind of device.

    `curve(share)[n - 1]` is the latency of n rows in seconds; curves are computed on first use and cached.

    padding: batch sizes to which smaller batches are padded, each with the fewest rows that are; such a batch takes as
    long as one of that size.
    """

    def __init__(self, model: str, kind: str, points: Iterable[Point], padding: Iterable[tuple[int, int]] = ()) -> None:
        self.model = model
        self.kind = kind
        self.padding = tuple(sorted(padding))
        self.points = tuple(sorted(points, key=lambda p: (p.procs, p.share, p.batch)))
        if not self.points:
            raise ConfigError(f"the profile of {model!r} on {kind!r} has no point")
        self.max_batch = max(point.batch for point in self.points)
        self.shares = tuple(sorted({point.share for point in self.points}))
        self._grids: dict[int, tuple[list[int], NDArray[np.float64]]] = {}
        self._curves: dict[tuple[int, int], tuple[float, ...]] = {}
        batches = sorted({point.batch for point in self.points})
        largest = np.maximum.accumulate([max(p.memory for p in self.points if p.batch == b) for b in batches])
        self._memory = tuple(zip(batches, (int(m) for m in largest), strict=True))

    def latency(self, batch: int, share: int, procs: int = 1) -> float:
        """Return the seconds of a batch on a share (‰) while `procs` workers of the model run there; inf outside the
        grid.
        """
        if not 1 <= batch <= self.max_batch:
            return math.inf
        return self.curve(share, procs)[batch - 1]

    def curve(self, share: int, procs: int = 1) -> tuple[float, ...]:
        """Return latencies in seconds of batches 1 to `max_batch` on a share (‰)."""
        curve = self._curves.get((share, procs))
        if curve is None:
            curve = self._interpolate(share, procs)
            if self.padding:
                curve = tuple(curve[self._padded(rows) - 1] for rows in range(1, self.max_batch + 1))
            self._curves[share, procs] = curve
        return curve

    def on(self, kind: str, seconds: float) -> Profile:
        """Return the profile of the model on another kind, where every batch takes so many seconds more."""
        points = [msgspec.structs.replace(point, latency=point.latency + seconds) for point in self.points]
        return Profile(self.model, kind, points, self.padding)

    def padded_to(self, padding: Iterable[tuple[int, int]]) -> Profile:
        """Return the profile of the model where batches are padded."""
        return Profile(self.model, self.kind, self.points, padding)

    def memory(self, batch: int) -> int:
        """Return the bytes of one worker whose largest batch is `batch`."""
        for measured, size in self._memory:
            if measured >= batch:
                return size
        return self._memory[-1][1]

    def features(self, batch: int, share: int) -> dict[str, float]:
        """Return the further columns of the `nearest` point."""
        return self.nearest(batch, share).features

    def smoothed(self) -> list[tuple[Point, float]]:
        """Return points that count as slower or faster than measured, with the seconds that they count as.

        Slower by more than RAISED: a plan that relies on such a point promises less than was measured there. Faster by
        more than LOWERED: it promises more. Those that differ most come first.
        """
        counted = [(point, self.latency(point.batch, point.share, point.procs)) for point in self.points]
        changed = [
            (point, seconds)
            for point, seconds in counted
            if seconds > (1 + RAISED) * point.latency or point.latency > (1 + LOWERED) * seconds
        ]
        return sorted(changed, key=lambda each: -abs(math.log(each[1] / each[0].latency)))

    def nearest(self, batch: int, share: int) -> Point:
        """Return the measured point nearest in share, then in batch."""
        return min(self.points, key=lambda p: (abs(p.share - share), abs(p.batch - batch)))

    def _padded(self, rows: int) -> int:
        """Return the rows that a batch of so many is run with."""
        fitting = (size for size, lowest in self.padding if lowest <= rows <= size <= self.max_batch)
        return next(fitting, rows)

    def _interpolate(self, share: int, procs: int) -> tuple[float, ...]:
        shares, grid = self._grid(procs)
        if not shares or share < shares[0]:
            return (math.inf,) * self.max_batch
        if share >= shares[-1]:
            return tuple(grid[-1].tolist())
        above = next(i for i, measured in enumerate(shares) if measured >= share)
        if shares[above] == share:
            return tuple(grid[above].tolist())
        low, high = shares[above - 1], shares[above]
        weight = (1 / share - 1 / high) / (1 / low - 1 / high)
        # What is unknown on the lower share stays unknown.
        slower = np.full(self.max_batch, math.inf)
        np.subtract(grid[above - 1], grid[above], out=slower, where=np.isfinite(grid[above - 1]))
        return tuple((grid[above] + weight * slower).tolist())

    def _grid(self, procs: int) -> tuple[list[int], NDArray[np.float64]]:
        """Return measured shares, and for each a row of latencies over batches 1 to `max_batch`, monotone in both."""
        if procs not in self._grids:
            shares, batches, measured = self._measured(procs)
            grid = _monotone(batches, measured, self.max_batch)
            fitted = _fitted(measured)
            if fitted is not None:
                grid = np.minimum(grid, _monotone(batches, fitted, self.max_batch))
            self._grids[procs] = shares, grid
        return self._grids[procs]

    def _measured(self, procs: int) -> tuple[list[int], list[int], NDArray[np.float64]]:
        """Return the measured shares and batches, and the latencies, nan where not measured, by share and batch."""
        points = [point for point in self.points if point.procs == procs]
        shares, batches = sorted({point.share for point in points}), sorted({point.batch for point in points})
        rows, columns = {share: n for n, share in enumerate(shares)}, {batch: n for n, batch in enumerate(batches)}
        measured = np.full((len(shares), len(batches)), math.nan)
        for point in points:
            measured[rows[point.share], columns[point.batch]] = point.latency
        return shares, batches, measured


def _fitted(measured: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the isotonic regression of latencies by share and batch, plus one standard deviation of those around it
    that are not on it; None where all are.

    In logarithms, since noise is in proportion.
    """
    logs = np.log(measured)
    fitted = isotonic_grid(logs)
    residuals = np.abs(logs - fitted)
    residuals = residuals[residuals > MIN_RESIDUAL]
    if not len(residuals):
        return None
    return np.asarray(np.exp(fitted + math.sqrt(float(np.mean(residuals**2)))))


def _monotone(batches: Sequence[int], measured: NDArray[np.float64], max_batch: int) -> NDArray[np.float64]:
    """Return latencies by share over batches 1 to `max_batch`, linear between the measured ones; each at least those of
    fewer rows or more share, and inf where not known."""
    grid = np.full((len(measured), max_batch), math.inf)
    wanted = np.arange(1, max_batch + 1)
    for row, latencies in zip(grid, measured, strict=True):
        known = ~np.isnan(latencies)
        within = wanted <= max(itertools.compress(batches, known))
        row[within] = np.interp(
            wanted[within], list(itertools.compress(batches, known)), np.maximum.accumulate(latencies[known])
        )
    # Known latencies are at least those of fewer rows or more share; unknown ones at most those of more rows
    # or less share.
    is_known = np.isfinite(grid)
    slowest = np.maximum.accumulate(np.where(is_known, grid, 0.0), axis=1)
    slowest = np.maximum.accumulate(slowest[::-1], axis=0)[::-1]
    grid = np.where(is_known, slowest, math.inf)
    grid = np.minimum.accumulate(grid[:, ::-1], axis=1)[:, ::-1]
    return np.minimum.accumulate(grid, axis=0)


# (model, kind) → profile.
Profiles = Mapping[tuple[str, str], Profile]


def slowed_profiles(profiles: Profiles, slowdowns: Mapping[str, float]) -> Profiles:
    """Return profiles with batches so many times as long, by model."""
    return {
        (model, kind): profile if slowdowns.get(model, 1.0) == 1.0 else _slowed(profile, slowdowns[model])
        for (model, kind), profile in profiles.items()
    }


def _slowed(profile: Profile, slowdown: float) -> Profile:
    points = (msgspec.structs.replace(point, latency=point.latency * slowdown) for point in profile.points)
    return Profile(profile.model, profile.kind, points, profile.padding)


def read_profiles(
    lines: Iterable[str], place: str, *, skip_zero_latency: bool = False
) -> dict[tuple[str, str], Profile]:
    """Read profiles from the lines of a CSV file (docs/reference.md, "Profile").

    skip_zero_latency: leave rows out whose latency is 0, which published profiles have for runs that failed.

    Raises ConfigError with `place` and the line.
    """
    zeros: list[int] = []
    rows = csv_rows(lines, place)
    header = [column.strip() for column in next(rows, (1, []))[1]]
    missing = [column for column in REQUIRED if column not in header]
    if len(header) == 1 and (separator := next((separator for separator in ";\t|" if separator in header[0]), "")):
        raise ConfigError(f"{place}:1: {separator!r} separates the columns; write commas, and points in numbers")
    if missing:
        raise ConfigError(f"{place}:1: column {missing[0]!r} is missing; a profile has {', '.join(REQUIRED)}")
    if len(set(header)) != len(header):
        raise ConfigError(f"{place}:1: two columns have the same name: {', '.join(header)}")
    if "" in header:
        raise ConfigError(f"{place}:1: column {header.index('') + 1} has no name; give it one, or remove it")
    collected: dict[tuple[str, str], dict[tuple[int, int, int], Point]] = {}
    for line, row in rows:
        if not row or not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise ConfigError(f"{place}:{line}: {len(row)} cells where the header names {len(header)}")
        cells = dict(zip(header, (cell.strip() for cell in row), strict=True))
        for column in ("model", "kind"):
            if not cells[column]:
                raise ConfigError(f"{place}:{line}: {column} is empty")
            if "\0" in cells[column]:
                raise ConfigError(f"{place}:{line}: {column} {cells[column]!r} contains a NUL character; rename it")
        name, kind = cells.pop("model"), cells.pop("kind")
        numbers = {
            column: parse_number(
                text, f"{place}:{line}: {column}", "" if column in (*REQUIRED, "procs") else FEATURE_HINT
            )
            for column, text in cells.items()
            if text
        }
        for column in ("share_pct", "batch", "latency_ms", "memory_mib"):
            if column not in numbers:
                raise ConfigError(f"{place}:{line}: {column} is empty")
        batch, procs = numbers.pop("batch"), numbers.pop("procs", 1.0)
        latency = numbers.pop("latency_ms") / 1e3
        memory = numbers.pop("memory_mib")
        if not 1 <= batch <= MAX_BATCH or batch != int(batch):
            raise ConfigError(f"{place}:{line}: batch {batch:g} is not a whole number from 1 to {MAX_BATCH}")
        if not 1 <= procs <= MAX_PROCS or procs != int(procs):
            raise ConfigError(f"{place}:{line}: procs {procs:g} is not a whole number from 1 to {MAX_PROCS}")
        for column, value, most in (("latency_ms", latency * 1e3, MAX_VALUE * 1e3), ("memory_mib", memory, MAX_VALUE)):
            if value > most:
                raise ConfigError(f"{place}:{line}: {column} {value:g} is above {most:g}; write what was measured")
        if latency == 0:
            zeros.append(line)
            continue
        if latency < 0:
            raise ConfigError(f"{place}:{line}: latency_ms {latency * 1e3:g} must be above 0")
        if memory < 0:
            raise ConfigError(f"{place}:{line}: memory_mib {memory:g} must not be negative")
        point = Point(
            share=parse_share(numbers.pop("share_pct"), f"{place}:{line}: share_pct"),
            batch=int(batch),
            latency=latency,
            memory=round(memory * MIB),
            procs=int(procs),
            features=numbers,
        )
        points = collected.setdefault((name, kind), {})
        key = (point.procs, point.share, point.batch)
        if key in points:
            raise ConfigError(
                f"{place}:{line}: {name} on {kind} at {point.share / 10:g} % and batch {point.batch} appears twice"
            )
        points[key] = point
    if zeros and not skip_zero_latency:
        raise ConfigError(
            f"{place}:{zeros[0]}: latency_ms is 0 in {show_count(len(zeros), 'row')}, as of a run that failed; measure"
            " again, remove them, or leave them out by `skip_zero_latency = true` in a problem"
        )
    if not collected:
        raise ConfigError(f"{place}: no row below the header; a profile has at least one point")
    return {(name, kind): Profile(name, kind, points.values()) for (name, kind), points in collected.items()}


def write_profiles(profiles: Iterable[Profile]) -> str:
    """Return the CSV text that `read_profiles` reads."""
    listed = list(profiles)
    extra = sorted({name for profile in listed for point in profile.points for name in point.features})
    text = io.StringIO()
    file = csv.writer(text, lineterminator="\n")
    file.writerow((*REQUIRED, "procs", *extra))
    for profile in listed:
        for point in profile.points:
            file.writerow(
                (
                    profile.model,
                    profile.kind,
                    f"{point.share / 10:g}",
                    point.batch,
                    f"{point.latency * 1e3:.6g}",
                    f"{point.memory / MIB:.6g}",
                    point.procs,
                    *(f"{point.features[name]:.6g}" if name in point.features else "" for name in extra),
                )
            )
    return text.getvalue()


def csv_rows(lines: Iterable[str], place: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of a CSV file with the number of their last line. Raises ConfigError for what is not CSV."""
    rows = csv.reader(lines)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"{place}:{rows.line_num}: is not CSV: {error}") from None
        if row is None:
            return
        yield rows.line_num, row


def parse_number(text: str, place: str, hint: str = "") -> float:
    """Parse a finite number. Raises ConfigError with `place`, the text and a hint."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{place}: {text!r} is not a number{hint}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{place}: {text!r} is not a finite number")
    return value
