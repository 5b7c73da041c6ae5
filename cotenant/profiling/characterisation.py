"""Characterise models by MLPerf's scenarios over configurations of a device, as the NTUA thesis does (chapter 6).

A configuration is a share of a device. Each model runs each scenario alone in each configuration, which fills the first
matrix, samples/s of models (rows) by configurations. The second, samples/s that a model loses beside each other one, is
of the offline scenario on two equal parts of a device (`profiling.pairs`). Both have gaps where something did not run,
and `predictors.svd` fills them: from the same measurements as profiles and as samples of pairs.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.backends import Backend
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import MIB, Point, Profile, csv_rows, parse_number, parse_share
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError, ModelError, WorkerError
from cotenant.live.rows import split_rows
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from cotenant.profiling.grid import (
    ARENA,
    Candidate,
    Listener,
    Tensors,
    grid_of,
    nearest_share,
    run_batch,
    worker_memory,
)
from cotenant.profiling.pairs import pair_shares
from cotenant.profiling.scenarios import (
    OFFLINE,
    PERCENTILES,
    SCENARIOS,
    SERVER,
    Generator,
    ScenarioResult,
    run_scenario,
)
from cotenant.worker.arena import Arena

PARTS = (1, 2, 4)  # into which the thesis divides a device
COLUMNS = (
    *("model", "kind", "share_pct", "scenario", "queries", "samples", "seconds", "rate"),
    *(f"p{percent}_ms" for percent in PERCENTILES),
    *("batch", "batch_ms", "memory_mib"),
)

Matrix = NDArray[np.float64]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of a scenario of a model on a share (‰) of a kind of device. memory: bytes."""

    model: str
    kind: str
    share: int
    result: ScenarioResult
    memory: int

    @property
    def key(self) -> RunKey:
        return self.model, self.kind, self.share, self.result.scenario


RunKey = tuple[str, str, int, str]


class Table(msgspec.Struct, frozen=True):
    """Hold a matrix with names. values: rows × columns, NaN where nothing was measured."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Matrix

    def to_csv(self, corner: str) -> str:
        """Return CSV text, with empty cells for gaps. corner: what the rows are."""
        text = io.StringIO()
        file = csv.writer(text, lineterminator="\n")
        file.writerow((corner, *self.columns))
        for name, row in zip(self.rows, self.values, strict=True):
            file.writerow((name, *("" if np.isnan(value) else f"{value:.6g}" for value in row)))
        return text.getvalue()


def default_shares(kind: Kind) -> tuple[int, ...]:
    """Return the legal shares nearest to a whole device, a half and a quarter, descending."""
    return tuple(sorted({nearest_share(WHOLE // parts, kind.cuts) for parts in PARTS}, reverse=True))


async def run_scenarios(
    backend: Backend,
    candidates: Mapping[str, Candidate],
    kind: Kind,
    *,
    shares: Sequence[int],
    scenarios: Sequence[str],
    batch: int,
    seconds: float,
    targets: Mapping[str, float],
    done: Collection[RunKey] = (),
    generator: Generator | None = None,
) -> AsyncGenerator[Run | tuple[str, int, str], None]:
    """Run scenarios of each model alone on shares of the first device of a kind, which must be idle otherwise.

    batch: the largest that the system takes at once. seconds: of each run. targets: seconds, by model, for the server
    scenario. done: runs that are left out. generator: of queries. Yields runs, larger shares first, or (model, share,
    reason) where a model cannot run there.
    """
    bench = _Bench(backend, candidates, kind)
    try:
        for share, name in itertools.product(sorted(shares, reverse=True), candidates):
            wanted = [each for each in scenarios if (name, kind.name, share, each) not in done]
            if not wanted:
                continue
            rows = min(batch, candidates[name].model.max_batch)
            try:
                await bench.open(name, share, rows)
                top = np.inf
                # Offline first: the rate of the server scenario cannot exceed it.
                for scenario in sorted(wanted, key=SCENARIOS.index, reverse=True):
                    result = await run_scenario(
                        scenario, bench.run, rows, seconds=seconds, target=targets[name], top=top, generator=generator
                    )
                    top = result.samples_per_s if scenario == OFFLINE else top
                    yield Run(model=name, kind=kind.name, share=share, result=result, memory=bench.memory())
            except (ModelError, WorkerError) as error:
                yield name, share, str(error)
    finally:
        await bench.close()


class _Bench:
    """Run batches of one model at a time, on a lane of its own."""

    def __init__(self, backend: Backend, candidates: Mapping[str, Candidate], kind: Kind) -> None:
        self._candidates = candidates
        self._device = DeviceId(kind.name)
        self._grid = grid_of(kind)
        self._arena = Arena(ARENA)
        self._listener = Listener()
        self._pool = SupervisedPool(backend, self._arena, self._listener)
        self._numbers, self._slots = itertools.count(1), itertools.count()
        self._lane: LaneId | None = None
        self._name = ""
        self._reported = 0  # bytes of device memory, where the model reports it
        self._rows = 0
        self._inputs: Iterator[Sequence[Tensors]] = iter(
            ()
        )  # batches of that many rows; smaller ones are parts of them

    async def open(self, name: str, share: int, rows: int) -> None:
        """Start a worker for one model in the place of the one before. Raises WorkerError."""
        if self._lane is not None:
            await self._pool.stop(self._lane, grace=1.0)
        self._name, self._rows, self._reported = name, rows, 0
        self._inputs = iter(())  # frees those of the model before
        candidate = self._candidates[name]
        self._inputs = itertools.cycle(candidate.requests(rows, self._grid, self._arena))
        self._lane = LaneId(self._device, next(self._slots))
        await self._pool.start(self._lane, share, [msgspec.structs.replace(candidate.model, max_batch=rows)])

    async def run(self, samples: int) -> None:
        """Run one batch. Raises ModelError and WorkerError."""
        assert self._lane is not None
        inputs = next(self._inputs)
        if samples < self._rows:
            inputs = _first_rows(inputs, samples)
        _, timing = await run_batch(self._pool, self._listener, self._lane, next(self._numbers), self._name, inputs)
        self._reported = max(self._reported, timing.memory)

    def memory(self) -> int:
        return self._reported or worker_memory(self._pool, self._lane)

    async def close(self) -> None:
        await self._pool.close(grace=1.0)
        self._inputs = iter(())
        self._arena.close()


def _first_rows(requests: Sequence[Tensors], rows: int) -> Sequence[Tensors]:
    """Return the first rows of a batch, without a copy: of as many requests, or of the one that has all rows."""
    if len(requests) > 1:
        return requests[:rows]
    return [tuple([split_rows(tensor, [rows])[0] for tensor in requests[0]])]


def colocated_pairs(runs: Iterable[Run], kind: Kind) -> list[tuple[Load, ...]]:
    """Return all pairs of models on two parts of a device, as equal as can be, with the batches of the offline
    scenario; a model may be beside itself. Empty where a device cannot be divided."""
    halves = min((cut for cut in pair_shares(kind) if len(cut) == 2), key=lambda cut: cut[1] - cut[0], default=None)
    if halves is None:
        return []
    batches = {run.model: run.result.batch for run in runs if run.kind == kind.name and run.result.scenario == OFFLINE}
    return [
        tuple(Load(name, kind.name, batches[name], share) for name, share in zip(pair, halves, strict=True))
        for pair in itertools.combinations_with_replacement(sorted(batches), 2)
    ]


def configurations(runs: Sequence[Run]) -> Table:
    """Return samples/s of models alone, by kind, share and scenario."""
    rates = {run.key: run.result.samples_per_s for run in runs}
    models = tuple(dict.fromkeys(run.model for run in runs))
    keys = sorted({key[1:] for key in rates}, key=lambda key: (key[0], SCENARIOS.index(key[2]), -key[1]))
    values = np.array([[rates.get((model, *key), np.nan) for key in keys] for model in models])
    return Table(models, tuple(f"{kind} {share / 10:g}% {scenario}" for kind, share, scenario in keys), values)


def interference(samples: Sequence[Sample], kind: str) -> Table:
    """Return samples/s that models lose beside each other on a kind of device, means over what was measured."""
    lost: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.victim.kind == kind and len(sample.colocated) == 1:
            batch = sample.victim.batch
            lost.setdefault((sample.victim.model, sample.colocated[0].model), []).append(
                batch / sample.alone - batch / sample.together
            )
    rows = tuple(dict.fromkeys(victim for victim, _ in lost))
    columns = tuple(sorted({other for _, other in lost}))
    values = [[np.mean(lost[row, column]) if (row, column) in lost else np.nan for column in columns] for row in rows]
    return Table(rows, columns, np.array(values, float).reshape(len(rows), len(columns)))


def profiles_of(runs: Sequence[Run]) -> list[Profile]:
    """Return the latencies of batches that the runs came to: of one sample, and of those that fill the offline batch.

    Of several scenarios with the same batch the last in `SCENARIOS` counts; of the server scenario none does, since
    what waits there is of any size.
    """
    points: dict[tuple[str, str], dict[tuple[int, int], Point]] = {}
    for run in sorted(runs, key=lambda run: SCENARIOS.index(run.result.scenario)):
        if run.result.scenario != SERVER:
            points.setdefault((run.model, run.kind), {})[run.share, run.result.batch] = Point(
                share=run.share, batch=run.result.batch, latency=run.result.batch_seconds, memory=run.memory
            )
    return [Profile(model, kind, by_place.values()) for (model, kind), by_place in points.items()]


def write_runs(runs: Iterable[Run]) -> str:
    """Return the CSV text that `read_runs` reads: milliseconds, MiB, and shares in percent."""
    text = io.StringIO()
    file = csv.writer(text, lineterminator="\n")
    file.writerow(COLUMNS)
    for run in runs:
        result = run.result
        file.writerow(
            (
                *(run.model, run.kind, f"{run.share / 10:g}", result.scenario, result.queries, result.samples),
                *(f"{result.seconds:.6g}", "" if result.rate is None else f"{result.rate:.6g}"),
                *("" if np.isinf(latency) else f"{1e3 * latency:.6g}" for latency in result.latencies),
                *(result.batch, f"{1e3 * result.batch_seconds:.6g}", f"{run.memory / MIB:.6g}"),
            )
        )
    return text.getvalue()


def read_runs(lines: Iterable[str], place: str) -> list[Run]:
    """Read runs from the lines of a CSV file. Raises ConfigError with `place` and the line."""
    rows = csv_rows(lines, place)
    header = tuple(column.strip() for column in next(rows, (1, []))[1])
    if header != COLUMNS:
        raise ConfigError(
            f"{place}:1: these are no runs of `cotenant characterise`; its columns are {','.join(COLUMNS)}"
        )
    runs = []
    for line, row in rows:
        if len(row) != len(header):
            raise ConfigError(f"{place}:{line}: {len(row)} cells where the header names {len(header)}")
        runs.append(_run(dict(zip(header, map(str.strip, row), strict=True)), f"{place}:{line}"))
    return runs


def _run(row: Mapping[str, str], place: str) -> Run:
    if row["scenario"] not in SCENARIOS:
        raise ConfigError(f"{place}: scenario {row['scenario']!r} is unknown; available: {', '.join(SCENARIOS)}")

    def name(column: str) -> str:
        if not row[column]:
            raise ConfigError(f"{place}: {column} is empty")
        return row[column]

    def number(column: str) -> float:
        value = parse_number(row[column], f"{place}: {column}")
        if value < 0:
            raise ConfigError(f"{place}: {column}: {row[column]} is negative")
        return value

    def positive(column: str) -> float:
        if (value := number(column)) == 0:
            raise ConfigError(f"{place}: {column}: {row[column]} must be above 0")
        return value

    def count(column: str, *, least: int) -> int:
        if not (value := number(column)).is_integer() or value < least:
            raise ConfigError(f"{place}: {column}: {row[column]} is not a whole number of at least {least}")
        return int(value)

    served = (
        row["scenario"] != SERVER or number("rate") > 0
    )  # otherwise no rate was served in time, and no query counts
    if row["scenario"] != SERVER and row["rate"]:
        raise ConfigError(f"{place}: rate {row['rate']!r}: only the scenario {SERVER} has one; leave it empty")
    return Run(
        model=name("model"),
        kind=name("kind"),
        share=parse_share(number("share_pct"), f"{place}: share_pct"),
        memory=round(number("memory_mib") * MIB),
        result=ScenarioResult(
            scenario=row["scenario"],
            queries=count("queries", least=int(served)),
            samples=count("samples", least=int(served)),
            seconds=positive("seconds"),
            rate=number("rate") if row["scenario"] == SERVER else None,
            latencies=tuple(
                number(column) / 1e3 if row[column] else np.inf
                for column in (f"p{percent}_ms" for percent in PERCENTILES)
            ),
            batch=count("batch", least=1),
            batch_seconds=(positive if served else number)("batch_ms") / 1e3,
        ),
    )
