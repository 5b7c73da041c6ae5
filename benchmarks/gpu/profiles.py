"""Stage 2: profiles of the models at eight shares and six batches under each backend, and counters of their kernels.

`profiles-<backend>.csv` has latency and memory and, on a GPU, `cuda_ms` and NVML's readings of power, clock and
utilisation. With `kernels.json`, the counters of Nsight Compute on the whole device, its points get features for
predictors.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

import msgspec
import uvloop

from benchmarks.gpu.session import Session, first
from cotenant.backends import Backend, nvidia
from cotenant.cli.pairs import candidate
from cotenant.config import read_profiles_file
from cotenant.core.identity import DeviceId
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.errors import DeviceError, ModelError
from cotenant.live.deployment import ServableModel
from cotenant.profiling import counters
from cotenant.profiling.counters import Kernel
from cotenant.profiling.grid import Candidate, Grid, grid_of, measure_profiles

SHARES = (100, 200, 300, 400, 500, 600, 800, 1000)
SECONDS = 0.1  # for a point
PROFILES = 3  # of the time, those of a backend, where counters get 1
EVERY = 20  # points between writes
ROWS = 37  # different ones of a model; no divisor of a batch
COUNTED = (1, 8, 32)  # batches
FOR_ONE = 90.0  # seconds for ncu per model
LOOK = 0.05  # seconds between readings

Points = dict[str, list[Point]]


def run(session: Session, models: Mapping[str, ServableModel]) -> None:
    left = PROFILES * len(session.backends) + (not session.cpu)
    for name in session.backends:
        with session.backend(name) as backend:
            if backend is not None:
                uvloop.run(_measured(session, models, name, backend, session.left * (1 - PROFILES / left)))
        left -= PROFILES
    if not session.cpu:
        _count(session, models)


def read(path: Path, of: str = "") -> dict[str, Profile]:
    """Return profiles by model, of that kind of device or of any; none if there is no file."""
    found = read_profiles_file(path) if path.exists() else {}
    return {model: profile for (model, kind), profile in found.items() if of in ("", kind)}


async def _measured(
    session: Session, models: Mapping[str, ServableModel], name: str, backend: Backend, rest: float
) -> None:
    """Measure profiles. rest: seconds to leave for later backends."""
    kind, file = first(backend), f"profiles-{name}.csv"
    grid = _grid(session, backend)
    known = read(session.out / file, kind.name)
    found: Points = {model: list(known[model].points) if model in known else [] for model in models}
    candidates = {model: reusing(candidate(offer)) for model, offer in models.items()}
    before, begun = sum(map(len, found.values())), time.monotonic()
    session.say(f"{name}: {before} of {len(models) * grid.points} points are known; {kind.name}, {backend.isolation()}")

    def write() -> None:
        profiles = known | {model: Profile(model, kind.name, points) for model, points in found.items() if points}
        session.write(file, write_profiles(profiles.values()))

    points = measure_profiles(backend, candidates, device=DeviceId(kind.name), grid=grid, known=found)
    with _watched(session) as readings:
        try:
            async with aclosing(points), asyncio.timeout(session.left - rest):
                async for model, point in points:
                    if isinstance(point, str):
                        session.lacks(f"{name}: {model}: {point}")
                        continue
                    point.features.update(readings())
                    found[model].append(point)
                    if sum(map(len, found.values())) % EVERY == 0:
                        write()
        except TimeoutError:
            session.lacks(f"{name}: out of time; {_unmeasured(found, grid)}")
    done = sum(map(len, found.values()))
    if done > before:
        write()
    session.say(f"{name}: {done - before} points in {time.monotonic() - begun:.0f} s; {done} in all")


def reusing(made: Candidate) -> Candidate:
    """Return the candidate with few different rows that take turns: to make new ones for each batch would take a
    quarter of the time on a GPU."""
    rows = itertools.cycle([made.sample(1) for _ in range(ROWS)])
    return msgspec.structs.replace(made, sample=lambda count: next(rows) if count == 1 else made.sample(count))


def _grid(session: Session, backend: Backend) -> Grid:
    if session.cpu:
        return Grid(shares=(1000, 500, 250), batches=(1, 4), seconds=SECONDS)
    return msgspec.structs.replace(grid_of(first(backend), SHARES), seconds=SECONDS)


def _unmeasured(found: Points, grid: Grid) -> str:
    """Describe the shares at which points are missing."""
    short = [
        f"{share / 10:g} %"
        for share in grid.shares
        if any(not any(point.share == share for point in points) for points in found.values())
    ]
    return f"some models have nothing at {', '.join(short)}" if short else "some batches are missing"


@contextmanager
def _watched(session: Session) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield a function that returns medians of NVML's readings since its last call.

    NVML's utilisation covers the last sixth of a second or more (a second on some products): for short points it
    includes earlier ones.
    """
    if session.cpu:
        yield dict
        return
    uuid, ended = nvidia.select_gpus(nvidia.list_gpus())[0].uuid, threading.Event()
    readings: list[nvidia.GpuReading] = []

    def look() -> None:
        with suppress(DeviceError):  # a lost GPU is reported by what runs on it
            while not ended.wait(LOOK):
                readings.append(nvidia.gpu_reading(uuid))

    def taken() -> dict[str, float]:
        some, readings[:] = list(readings) or [nvidia.gpu_reading(uuid)], []
        columns: dict[str, list[float]] = {
            "power_w": [it.power for it in some if it.power is not None],
            "clock_mhz": [it.clock for it in some if it.clock is not None],
            "nvml_busy_pct": [100 * it.utilisation for it in some if it.utilisation is not None],
            "nvml_memory_busy_pct": [100 * it.bandwidth for it in some if it.bandwidth is not None],
        }
        return {name: statistics.median(values) for name, values in columns.items() if values}

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


def _count(session: Session, models: Mapping[str, ServableModel]) -> None:
    """Count kernels of each model, and add features to all profiles."""
    path = session.out / "kernels.json"
    counted: dict[str, dict[int, list[Kernel]]] = {}
    if path.exists():
        counted = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[int, list[Kernel]]])
    for model, offer in models.items():
        if model in counted:
            continue
        if session.left < FOR_ONE / 2:
            session.lacks(f"counters of {model}: out of time")
            continue
        described = candidate(offer).model
        batches = [batch for batch in COUNTED if batch <= described.max_batch]
        begun = time.monotonic()
        try:
            seconds = min(FOR_ONE, session.left - 5)
            sized = msgspec.structs.replace(described, max_batch=batches[-1])
            counted[model] = counters.count_kernels(sized, batches, seconds=seconds)
        except (DeviceError, ModelError) as error:
            session.lacks(f"counters of {model}: {error}")
            continue
        session.write(path.name, msgspec.json.encode(counted))
        kernels = sum(map(len, counted[model].values()))
        session.say(f"counters: {kernels} kernels of {model} in {time.monotonic() - begun:.0f} s")
    for name in session.backends:
        file = session.out / f"profiles-{name}.csv"
        profiles = [
            Profile(model, profile.kind, counters.with_counters(profile.points, counted.get(model, {})))
            for model, profile in read(file).items()
        ]
        if profiles:
            session.write(file.name, write_profiles(profiles))
