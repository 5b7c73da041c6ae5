"""Stage 3: co-located measurements under each backend, as samples for predictors: `pairs-<backend>.csv`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing

import uvloop

from benchmarks.gpu import profiles
from benchmarks.gpu.session import Session, first
from cotenant.backends import Backend
from cotenant.cli.pairs import candidate
from cotenant.config import read_samples_file
from cotenant.core.profile import Profiles
from cotenant.errors import ModelError
from cotenant.live.deployment import ServableModel
from cotenant.predictors.samples import Sample, write_samples
from cotenant.profiling.grid import Grid, grid_of
from cotenant.profiling.pairs import candidate_pairs, measure_pairs, measured_pairs

COUNT = 300  # runs
SECONDS = 0.3  # for one
AT_ONCE = 100  # runs chosen together; workers restart for each cut among them
EVERY = 20  # samples between writes
TRIES = 3  # runs faster than in isolation are repeated later


def run(session: Session, models: Mapping[str, ServableModel]) -> None:
    for place, name in enumerate(session.backends):
        known = profiles.read(session.out / f"profiles-{name}.csv")
        if missing := sorted(models.keys() - known):
            session.lacks(f"{name}: pairs of {', '.join(missing)} need their profiles, which stage 2 measures")
            continue
        by_kind = {(model, profile.kind): profile for model, profile in known.items() if model in models}
        rest = session.left * (1 - 1 / (len(session.backends) - place))
        with session.backend(name) as backend:
            if backend is not None:
                uvloop.run(_measured(session, models, name, backend, by_kind, rest))


async def _measured(
    session: Session, models: Mapping[str, ServableModel], name: str, backend: Backend, known: Profiles, rest: float
) -> None:
    """Measure pairs. rest: seconds to leave for later backends."""
    kind, path = first(backend), session.out / f"pairs-{name}.csv"
    runs = candidate_pairs(known, kind)
    wanted = 6 if session.cpu else min(COUNT, len(runs))
    samples: list[Sample] = read_samples_file(path) if path.exists() else []
    candidates = {model: profiles.reusing(candidate(offer)) for model, offer in models.items()}
    grid = Grid() if session.cpu else grid_of(kind)
    begun, before = time.monotonic(), len(measured_pairs(runs, samples))
    session.say(f"{name}: {before} of {wanted} runs are known, {len(runs)} to choose from")
    try:
        async with asyncio.timeout(session.left - rest):
            for _ in range(TRIES):
                done = measured_pairs(runs, samples)
                left = max(0, wanted - len(done))
                found = measure_pairs(
                    backend, candidates, runs, known, done=done, count=left, grid=grid, seconds=SECONDS, at_once=AT_ONCE
                )
                try:
                    async with aclosing(found):
                        async for together in found:
                            if isinstance(together, str):
                                raise ModelError(together)
                            samples.extend(together)
                            if len(samples) % EVERY < len(together):
                                session.write(path.name, write_samples(samples))
                    break
                except ModelError as error:
                    session.say(f"{name}: {error}")
            else:
                session.lacks(f"{name}: pairs failed {TRIES} times")
    except TimeoutError:
        session.lacks(f"{name}: out of time after {len(measured_pairs(runs, samples))} of {wanted} runs")
    after = len(measured_pairs(runs, samples))
    if after > before:
        session.write(path.name, write_samples(samples))
    session.say(f"{name}: {after - before} runs in {time.monotonic() - begun:.0f} s; {after} in all")
