"""What does a best-effort job cost what is served beside it, and how much of the idle processor time does it get?

`python -m benchmarks.jobs [--model-repository DIR] [--scales X …] [--seconds S] [--rounds N] [--step-rounds N]
[--batch N] [--jobs N] [--seed N] [--json]`

The demo's models are served at a part of their planned rates, by Poisson arrivals from a process of its own. A job that
trains a reader of digits with PyTorch on all processors, or `--jobs` of them, which divide the processors, is paused
and resumed meanwhile: turns of 3 s without and beside it, of which `--seconds` on either side are a round. Both turns
of a pair get the same arrivals. Of each scale it tells, with 95 % intervals over rounds:

- *p99*: of each model beside the job over without it, the geometric mean over models, weighted by their requests; a
  model of which fewer than 100 requests came in a round counts by its p50, as the highest of a few says little;
- *mean*: the same of mean latencies, which vary less than the slowest percent;
- *attainment*: beside the job less without it, in points;
- *idle*: the processor seconds of the job, of these and those that nobody used in its turns. Threads of a job that wait
  for each other use none: `--scales 0.01` shows what it takes where next to nothing is served.

Then all rates double, from 45 % to 90 % of what is planned: after how long the job has nothing any more, until when it
has used how many processor milliseconds, and the longest batch of the server meanwhile; how long batches took in the
0.2 s and in the second after the step, with the job over without it; and how many requests after it missed their
targets.

With other load on the machine, a job that takes what nobody else wants gets nothing: run it with nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from benchmarks.adaptive import Segment, Tick, send
from benchmarks.harness import show_result
from benchmarks.job_load import SETTLING, Begun, Load, Reports, Turn, sending
from cotenant.app.backend import create_backend
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.jobs import running_jobs
from cotenant.app.lifecycle import running
from cotenant.app.running_server import RunningServer
from cotenant.app.startup import Prepared
from cotenant.backends import Backend
from cotenant.cli.demo import demo_settings
from cotenant.cli.demo_rates import plan_demo_once
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.config import read_settings
from cotenant.config.jobs import JobSettings
from cotenant.control.jobs.events import JobCancelAsked, JobPauseAsked, JobResumeAsked, JobSubmitted
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.job import Job, JobStatus, Training
from cotenant.live.foreign_load import BUSY, TICK, available_cores
from cotenant.live.jobs.driver import JobDriver
from cotenant.measure.report import ModelReport
from cotenant.zoo import DEMO, build_models

FEW = 100  # requests of a model in a round, below which its p99 is that of one or two
BEFORE, AFTER, STEP = 8.0, 3.0, 2.0  # seconds before and after the rates change, and by how much
WINDOWS = (0.2, 1.0)  # seconds after the rates change
KINDS = ("without", "beside")  # of turns: without jobs and beside them
TURN = 3.0  # seconds: so short that a machine that grows slower does so for both kinds
SETTLE = 1.0  # seconds at the start of each turn that do not count
WARM_UP = 5.0  # seconds of load before the first turn: load that begins is a step for which jobs yield
START = 60.0  # seconds that a job may take until its first step
BATCH = 512  # of its steps: with fewer rows a second thread has little to do
STEPS = 1_000_000  # of a job, which is to outlast its rounds
POLL = 0.005  # seconds between two looks at the job while rates change
# Of Student's t, two-sided 95 %, by degrees of freedom; beyond, that of the normal distribution.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Interval(msgspec.Struct, frozen=True):
    """A mean over rounds with its 95 % interval; of one round, that is not known."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)

    def show(self, factor: float = 1.0, digits: int = 2) -> str:
        low, mean, high = (f"{factor * value:.{digits}f}" for value in (self.low, self.mean, self.high))
        return f"{mean} ({low} to {high})"


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the turns of a kind. idle: processor seconds that nobody used; job: those of the job."""

    models: tuple[ModelReport, ...]
    seconds: float
    idle: float
    job: float = 0.0
    steps: int = 0


class AtScale(msgspec.Struct, frozen=True, kw_only=True):
    """What a job cost and got at a part of the planned rates. p99, mean: with over without; attainment: with less
    without. got: part of what was idle; steps: a second. models: median p99 in seconds without and with, by model."""

    scale: float
    p99: Interval
    mean: Interval
    attainment: Interval
    got: Interval
    steps: float
    idle: float
    without: float
    models: dict[str, tuple[float, float]]


class Doubled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the job when rates doubled.

    seconds: until it had nothing, in each round; NaN where it kept what it had. used: processor seconds that it took
    from the step to then. batch: longest batch of the plan, in seconds. slower: what batches took in each of the
    `WINDOWS` after the step with the job, over those without it. missed: of so many requests after the step, those that
    missed their targets, without and with the job.
    """

    seconds: tuple[float, ...]
    used: tuple[float, ...]
    batch: float
    slower: tuple[Interval, ...]
    missed: tuple[int, int]
    requests: tuple[int, int]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    scales: tuple[AtScale, ...]
    doubled: Doubled | None


class Bench:
    """Serve with and without jobs. batch: rows of their steps. together: how many run at a time. seed: of arrivals."""

    def __init__(
        self,
        server: RunningServer,
        jobs: JobDriver,
        rates: dict[str, float],
        batch: int,
        together: int = 1,
        seed: int = 0,
    ) -> None:
        self.server = server
        self._jobs = jobs
        self._serving = jobs._serving
        self._rows = batch
        self._together = together
        self._seed = seed
        self._number = 0
        self.rates = rates
        self.batch = max(placed.latency for _, _, placed in server.deployment.plan.placements())

    @asynccontextmanager
    async def job(self) -> AsyncIterator[list[str]]:
        """Train within the block, from the first step on."""
        names = []
        threads = None if self._together == 1 else max(1, len(available_cores()) // self._together)
        work = Training(source="digits", steps=STEPS, batch=self._rows)
        for _ in range(self._together):
            self._number += 1
            names.append(f"digits-{self._number}")
            self._jobs.feed(JobSubmitted(Job(id=names[-1], name="digits", work=work, retries=0, threads=threads)))
        deadline = time.monotonic() + START
        while not all(self.status(name).progress.steps for name in names):
            for status in map(self.status, names):
                if time.monotonic() > deadline or status.state.ended:
                    sys.exit(f"the job does not run: {status.reason or status.state}")
            await asyncio.sleep(0.1)
        try:
            yield names
        finally:
            for name in names:
                self._jobs.feed(JobCancelAsked(name))
            while not all(self.status(name).state.ended for name in names):
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _no_job(self) -> AsyncIterator[list[str]]:
        yield []

    def status(self, name: str) -> JobStatus:
        return next(status for status in self._jobs.statuses() if status.job.id == name)

    def _taken(self, names: Sequence[str]) -> tuple[float, int]:
        """Return the share-seconds and the steps of jobs so far."""
        progress = [self.status(name).progress for name in names]
        return sum(each.share_seconds for each in progress), sum(each.steps for each in progress)

    async def paired(self, names: Sequence[str], scale: float, pairs: int, seed: int) -> tuple[Turns, Turns]:
        """Return what came of turns without jobs and with them, which are paused and resumed under load that goes on.
        Both turns of a pair get the same arrivals, and every other pair begins with the jobs."""
        turns = [Turn(kind=SETTLING, seconds=WARM_UP, seed=seed)]
        order = [with_job for pair in range(pairs) for with_job in ((False, True) if pair % 2 == 0 else (True, False))]
        for number, with_job in enumerate(order):
            settling = Turn(kind=SETTLING, seconds=SETTLE, seed=seed + 1 + number)
            turns += [settling, Turn(kind=KINDS[with_job], seconds=TURN, seed=seed + 1 + number // 2)]
        rates = {name: rate * scale for name, rate in self.rates.items()}
        idle, steps = {False: 0.0, True: 0.0}, 0
        async with aclosing(sending(self.server.addresses.http, Load(rates, tuple(turns)))) as lines:
            end = msgspec.json.decode(await anext(lines), type=Begun).at + WARM_UP
            await asyncio.sleep(end - time.monotonic())
            spent, steps = self._taken(names)
            for with_job in order:
                for name in names:
                    self._jobs.feed(JobResumeAsked(name) if with_job else JobPauseAsked(name))
                begun, busy = time.monotonic(), busy_seconds()
                end += SETTLE + TURN
                await asyncio.sleep(end - begun)
                passed = time.monotonic() - begun
                idle[with_job] += max(passed * len(available_cores()) - (busy_seconds() - busy), 0.0)
            for name in names:
                self._jobs.feed(JobResumeAsked(name))
            taken, after = self._taken(names)
            reports = msgspec.json.decode(await anext(lines), type=Reports)
        seconds = pairs * (SETTLE + TURN)
        without, beside = (reports[kind] for kind in KINDS)
        return (
            Turns(models=without, seconds=seconds, idle=idle[False]),
            Turns(models=beside, seconds=seconds, idle=idle[True], job=taken - spent, steps=after - steps),
        )

    async def doubled(self, rounds: int) -> Doubled:
        seconds, used = [], []
        missed, requests = [0, 0], [0, 0]
        took: dict[bool, list[list[float]]] = {False: [], True: []}
        for seed in range(rounds):
            for with_job in (False, True) if seed % 2 == 0 else (True, False):
                async with self.job() if with_job else self._no_job() as names:
                    nothing = asyncio.create_task(self._until_nothing(names))
                    batches = asyncio.create_task(self._batches_after_step())
                    ticks = await self._step_up(seed)
                    took[with_job].append(await batches)
                    nothing.cancel()
                    after, spent = await nothing  # which answers also when it is cancelled
                if with_job:
                    seconds.append(after)
                    used.append(spent)
                late, of = _missed_after(ticks, BEFORE)
                missed[with_job] += late
                requests[with_job] += of
        pairs = (missed[0], missed[1]), (requests[0], requests[1])
        pairs_of_windows = zip(*took[False], strict=True), zip(*took[True], strict=True)
        slower = tuple(
            Interval.of([b / a for a, b in zip(without, beside, strict=True)])
            for without, beside in zip(*pairs_of_windows, strict=True)
        )
        return Doubled(
            seconds=tuple(seconds),
            used=tuple(used),
            batch=self.batch,
            slower=slower,
            missed=pairs[0],
            requests=pairs[1],
        )

    async def _step_up(self, seed: int) -> list[Tick]:
        low = {name: rate * 0.9 / STEP for name, rate in self.rates.items()}
        high = {name: rate * 0.9 for name, rate in self.rates.items()}
        return await send(
            self.server.addresses.http, [Segment(BEFORE, low), Segment(AFTER, high)], self._seed + 2000 + seed
        )

    async def _step(self) -> None:
        """Wait until the rates change."""
        driver = self.server._server._driver
        first = driver.arrived.total()
        while driver.arrived.total() == first:
            await asyncio.sleep(POLL)
        await asyncio.sleep(BEFORE)

    async def _batches_after_step(self) -> list[float]:
        """Return what batches took within each of the `WINDOWS` after the step, over what they were profiled at."""
        await self._step()
        step, before = time.monotonic(), self._serving.batch_seconds()
        found = []
        for window in WINDOWS:
            await asyncio.sleep(step + window - time.monotonic())
            after = self._serving.batch_seconds()
            took, alone = (
                sum(pair[k] for pair in after.values()) - sum(pair[k] for pair in before.values()) for k in (0, 1)
            )
            found.append(took / alone if alone else math.nan)
        return found

    async def _until_nothing(self, names: Sequence[str]) -> tuple[float, float]:
        """Return how long after the step jobs had nothing, and what they used until then; NaN where they kept it."""
        try:
            await self._step()
            step = time.monotonic()
            used, _ = self._taken(names)
            while any(self.status(name).granted for name in names):
                await asyncio.sleep(POLL)
            after = time.monotonic() - step
            await asyncio.sleep(0.5)  # until it has been reported what they used
            return after, self._taken(names)[0] - used
        except asyncio.CancelledError:
            return math.nan, math.nan


def busy_seconds() -> float:
    """Return the processor seconds that all programs have used of the processors of this one."""
    names = {f"cpu{core}" for core in available_cores()}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    return sum(float(line[1 + field]) for line in lines if line[0] in names for field in BUSY) / TICK


def _missed_after(ticks: Sequence[Tick], since: float) -> tuple[int, int]:
    before = max((tick for tick in ticks if tick.seconds <= since), key=lambda tick: tick.seconds, default=ticks[0])
    last = ticks[-1]
    stayed = last.stayed - before.stayed
    return stayed - (last.within_target - before.within_target), stayed


def compared(scale: float, without: Sequence[Turns], beside: Sequence[Turns]) -> AtScale:
    """Compare the turns of each round."""
    names = [row.model for row in without[0].models]
    rows = {name: [(_row(a, name), _row(b, name)) for a, b in zip(without, beside, strict=True)] for name in names}
    return AtScale(
        scale=scale,
        p99=Interval.of([_slower(a.models, b.models, _tail) for a, b in zip(without, beside, strict=True)]),
        mean=Interval.of([_slower(a.models, b.models, _mean) for a, b in zip(without, beside, strict=True)]),
        attainment=Interval.of([_attained(b) - _attained(a) for a, b in zip(without, beside, strict=True)]),
        got=Interval.of([turn.job / max(turn.job + turn.idle, 1e-9) for turn in beside]),
        steps=sum(turn.steps for turn in beside) / sum(turn.seconds for turn in beside),
        idle=statistics.fmean(turn.idle / turn.seconds for turn in without),
        without=statistics.fmean(_attained(turn) for turn in without),
        models={
            name: (
                statistics.median(a.p99 or math.nan for a, _ in pairs),
                statistics.median(b.p99 or math.nan for _, b in pairs),
            )
            for name, pairs in rows.items()
        },
    )


def _row(turn: Turns, name: str) -> ModelReport:
    return next(row for row in turn.models if row.model == name)


def _slower(
    without: Sequence[ModelReport],
    beside: Sequence[ModelReport],
    of: Callable[[ModelReport, bool], float | None],
) -> float:
    """Return the geometric mean, weighted by requests, of the models' ratios of a latency. of: the latency in a turn;
    its second argument says that few requests came."""
    ratios, weights = [], []
    for a, b in zip(without, beside, strict=True):
        few = min(a.stayed, b.stayed) < FEW
        before, after = of(a, few), of(b, few)
        if before and after:
            ratios.append(math.log(after / before))
            weights.append(a.stayed)
    return math.exp(float(np.average(ratios, weights=weights)))


def _tail(row: ModelReport, few: bool) -> float | None:
    return row.p50 if few else row.p99


def _mean(row: ModelReport, few: bool) -> float | None:
    return row.mean


def _attained(turn: Turns) -> float:
    return 1 - sum(row.missed for row in turn.models) / sum(row.stayed for row in turn.models)


@asynccontextmanager
async def serving_demo(repository: Path) -> AsyncIterator[tuple[RunningServer, Backend, dict[str, float]]]:
    """Serve the demo's models; yield the server, its backend, and the planned rates."""
    build_models(repository, list(DEMO))
    settings = demo_settings(
        msgspec.structs.replace(
            read_settings(),
            model_repository=repository,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            jobs=JobSettings(enabled=False),  # those of this benchmark are its own
        )
    )
    backend = create_backend(settings)

    async def prepare(builder: DeploymentBuilder) -> Prepared:
        described = await builder.describe(list(DEMO))
        chosen = plan_demo_once(described.problem, settings, {})
        return Prepared(msgspec.structs.replace(described, problem=chosen.problem, plan=chosen.plan))

    async with running(settings, backend, prepare) as server:
        tune_for_latency()
        plan = server.deployment.plan
        yield server, backend, {name: rate for name in DEMO if (rate := plan.rate(name))}


async def measure(
    repository: Path,
    scales: Sequence[float],
    pairs: int,
    rounds: tuple[int, int],
    batch: int,
    together: int,
    seed: int,
) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving_demo(repository) as (server, backend, rates),
            running_jobs(server._server, backend, JobScheduler(), Path(folder), grace=5.0) as jobs,
        ):
            bench = Bench(server, jobs, rates, batch, together, seed)
            found = []
            for scale in scales:
                async with bench.job() as names:
                    turns = [
                        await bench.paired(names, scale, pairs, seed + 1000 * (1 + number))
                        for number in range(rounds[0])
                    ]
                found.append(compared(scale, *zip(*turns, strict=True)))
            return Result(scales=tuple(found), doubled=await bench.doubled(rounds[1]) if rounds[1] else None)


def _lines(result: Result) -> list[str]:
    lines = []
    for at in result.scales:
        lines.append(
            f"{at.scale * 100:.0f} % of the planned rates: p99 × {at.p99.show(digits=3)}, mean × "
            f"{at.mean.show(digits=3)}, attainment "
            f"{at.attainment.show(100)} points (of {at.without * 100:.2f} %), the job got {at.got.show(100, 1)} % of "
            f"what was idle ({at.idle:.2f} processors without it), {at.steps:.1f} steps/s"
        )
        lines += [f"  {name:<14} p99 {a * 1e3:8.2f} -> {b * 1e3:8.2f} ms" for name, (a, b) in at.models.items()]
    if (doubled := result.doubled) is None:
        return lines
    after = ", ".join(f"{seconds * 1e3:.0f}" for seconds in doubled.seconds)
    used = ", ".join(f"{seconds * 1e3:.0f}" for seconds in doubled.used)
    lines += [
        f"rates double: the job had nothing after {after} ms, where a batch takes {doubled.batch * 1e3:.0f} ms at "
        f"most, and used {used} ms of a processor until then",
        *(
            f"  batches of the {window:g} s after that took × {slower.show()} as long as without it"
            for window, slower in zip(WINDOWS, doubled.slower, strict=True)
        ),
        f"  missed their target after that: {doubled.missed[0]} of {doubled.requests[0]} without it, "
        f"{doubled.missed[1]} of {doubled.requests[1]} with it",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-repository", type=Path, default=Path("models"))
    parser.add_argument("--scales", type=float, nargs="*", default=[0.3, 0.6, 0.9])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the turns of a kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-rounds", type=int, help="of rates that double; by default as many as --rounds")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of a step of the job")
    parser.add_argument("--jobs", type=int, default=1, help="that run at a time")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rounds = args.rounds, args.rounds if args.step_rounds is None else args.step_rounds
    pairs = max(round(args.seconds / TURN), 1)
    result = uvloop.run(measure(args.model_repository, args.scales, pairs, rounds, args.batch, args.jobs, args.seed))
    show_result(result, *_lines(result))


if __name__ == "__main__":
    main()
