"""Read and write samples of co-located runs, on which predictors are fitted and evaluated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cotenant.core.profile import MAX_BATCH, csv_rows, parse_number
from cotenant.core.units import parse_share as parse_share
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors import Load

VICTIM = ("kind", "victim", "batch", "share_pct")
COLOCATED_COLUMNS = ("colocated", "colocated_batch", "colocated_share_pct")
TIMES = ("alone_ms", "together_ms")
COLUMNS = (*VICTIM, *COLOCATED_COLUMNS, *TIMES)
MIN_TIME_RATIO = 0.5  # in files: interference speeds nothing up, and noise seldom by this much; columns may be swapped
# Together over alone, of any sample: in published runs it is from 0.38, where a latency alone is wrong, to 14.
MIN_PLAUSIBLE_RATIO = 0.001
MAX_PLAUSIBLE_RATIO = 1000.0


def is_plausible(alone: float, together: float) -> bool:
    """Return whether some run can have taken these seconds."""
    return 0 < alone < math.inf and MIN_PLAUSIBLE_RATIO * alone <= together <= MAX_PLAUSIBLE_RATIO * alone


class Sample(msgspec.Struct, frozen=True):
    """Hold a victim's batch latency without and with co-located loads.

    alone, together: seconds. Raises PlanError for what no run can have taken.
    """

    victim: Load
    colocated: tuple[Load, ...]
    alone: float
    together: float

    def __post_init__(self) -> None:
        if not self.colocated:
            raise PlanError(f"a sample of {self.victim.model!r} has no co-located load; it belongs in a profile")
        if not is_plausible(self.alone, self.together):
            raise PlanError(
                f"a sample of {self.victim.model!r} took {self.alone:g} s alone and {self.together:g} s co-located; the"
                f" first must be finite and above 0, and the second {MIN_PLAUSIBLE_RATIO:g} to"
                f" {MAX_PLAUSIBLE_RATIO:g} times as long; remove it, or measure it again"
            )

    @property
    def slowdown(self) -> float:
        """The measured slowdown; noise may leave it slightly below 1."""
        return self.together / self.alone


def read_samples(lines: Iterable[str], place: str) -> list[Sample]:
    """Read samples from the lines of a CSV file (docs/reference.md, "Interference samples").

    Raises ConfigError with `place` and the line.
    """
    rows = csv_rows(lines, place)
    header = [column.strip() for column in next(rows, (1, []))[1]]
    if missing := [column for column in COLUMNS if column not in header]:
        if other := next((sign for sign in ";\t" if sum(sign in column for column in header) == len(header)), ""):
            raise ConfigError(f"{place}:1: columns are separated by {other!r}; write commas, and points in numbers")
        raise ConfigError(f"{place}:1: column {missing[0]!r} is missing; samples of pairs have {', '.join(COLUMNS)}")
    suffixes = [""]
    while f"colocated_{len(suffixes) + 1}" in header:
        suffixes.append(f"_{len(suffixes) + 1}")
    expected_columns = {*VICTIM, *TIMES, *(column + suffix for column in COLOCATED_COLUMNS for suffix in suffixes)}
    if unexpected := [column for column in header if column not in expected_columns] + sorted(
        expected_columns - set(header)
    ):
        raise ConfigError(
            f"{place}:1: column {unexpected[0]!r} is {'unknown' if unexpected[0] in header else 'missing'}; further"
            f" co-located models have {', '.join(f'{column}_2' for column in COLOCATED_COLUMNS)}"
        )
    if len(set(header)) != len(header):
        raise ConfigError(f"{place}:1: two columns have the same name: {', '.join(header)}")
    samples = []
    for line, row in rows:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise ConfigError(f"{place}:{line}: {len(row)} cells where the header names {len(header)}")
        samples.append(_sample(dict(zip(header, map(str.strip, row), strict=True)), suffixes, f"{place}:{line}"))
    if not samples:
        raise ConfigError(f"{place}: no row below the header; measure some with `cotenant profile --pairs`")
    return samples


def write_samples(samples: Iterable[Sample]) -> str:
    """Return the CSV text that `read_samples` reads."""
    listed = list(samples)
    max_colocated = max((len(sample.colocated) for sample in listed), default=1)
    suffixes = ["", *(f"_{i}" for i in range(2, max_colocated + 1))]
    text = io.StringIO()
    file = csv.writer(text, lineterminator="\n")
    file.writerow((*VICTIM, *(column + suffix for suffix in suffixes for column in COLOCATED_COLUMNS), *TIMES))
    for sample in listed:
        file.writerow(cells(sample, max_colocated))
    return text.getvalue()


def cells(sample: Sample, max_colocated: int) -> list[str]:
    """Return a sample's row, padded to `most` co-located loads."""
    row = [sample.victim.kind, *_written(sample.victim)]
    for load in sample.colocated:
        row += _written(load)
    row += ["", "", ""] * (max_colocated - len(sample.colocated))
    return [*row, f"{sample.alone * 1e3:.6g}", f"{sample.together * 1e3:.6g}"]


def _written(load: Load) -> list[str]:
    return [load.model, str(load.batch), f"{load.share / 10:g}"]


def _sample(row: Mapping[str, str], suffixes: Sequence[str], place: str) -> Sample:
    victim = _load(row, VICTIM[1:], row["kind"], place)
    if not any(row["colocated" + suffix] for suffix in suffixes):
        raise ConfigError(f"{place}: colocated is empty; a run without co-located models belongs in a profile")
    filled = [suffix for suffix in suffixes if any(row[column + suffix] for column in COLOCATED_COLUMNS)]
    colocated = tuple(
        _load(row, [column + suffix for column in COLOCATED_COLUMNS], row["kind"], place) for suffix in filled
    )
    alone, together = (parse_number(row[column], f"{place}: {column}") for column in TIMES)
    for column, value in zip(TIMES, (alone, together), strict=True):
        if value <= 0:
            raise ConfigError(f"{place}: {column} {value:g} must be above 0; remove the row if the pair did not fit")
    if together < MIN_TIME_RATIO * alone:
        raise ConfigError(
            f"{place}: together_ms {together:g} is less than half of alone_ms {alone:g}; interference makes nothing"
            " faster: are the columns swapped?"
        )
    if not is_plausible(alone, together):
        raise ConfigError(
            f"{place}: together_ms {together:g} is more than {MAX_PLAUSIBLE_RATIO:g} times alone_ms {alone:g}; remove"
            " the row, or measure it again"
        )
    return Sample(victim, colocated, alone / 1e3, together / 1e3)


def _load(row: Mapping[str, str], columns: Sequence[str], kind: str, place: str) -> Load:
    model, batch, share = columns
    for column in ("kind", model):
        if not row[column]:
            raise ConfigError(f"{place}: {column} is empty")
    rows = parse_number(row[batch], f"{place}: {batch}")
    if not 1 <= rows <= MAX_BATCH or rows != int(rows):
        raise ConfigError(f"{place}: {batch} {rows:g} is not a whole number from 1 to {MAX_BATCH}")
    percent = parse_number(row[share], f"{place}: {share}")
    return Load(row[model], kind, int(rows), parse_share(percent, f"{place}: {share}"))
