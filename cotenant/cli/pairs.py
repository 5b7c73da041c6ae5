"""Measure co-located models of a repository, as samples for `cotenant fit`: `cotenant profile --pairs`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.backends import Backend
from cotenant.cli.loading import write_file
from cotenant.cli.output import StepProgress, aside, progress_bars
from cotenant.config import read_samples_file
from cotenant.errors import ConfigError, ModelError
from cotenant.live.deployment import ServableModel
from cotenant.predictors.samples import Sample, write_samples
from cotenant.profiling.grid import Candidate, grid_of
from cotenant.profiling.pairs import candidate_pairs, enough_samples, measure_pairs, measured_pairs
from cotenant.worker.repository import sample_inputs, worker_model


def record_pairs(deployment: Any, backend: Backend, path: Path, count: int | None) -> None:
    """Measure pairs of the deployment's models, appending to a CSV file. Pairs that it has are not measured again.
    Raises ModelError where one cannot be measured; those before it are kept."""
    if backend.name == "fake":
        raise ConfigError(
            "the backend fake runs no models, so there is nothing to measure; use the backend cpu, or one for GPUs"
        )
    kinds = deployment.problem.fleet
    runs = [run for kind in kinds for run in candidate_pairs(deployment.problem.profiles, kind)]
    if not runs:
        raise ConfigError("no two co-located models run within a quarter of a second; there is nothing to measure")
    samples = existing_samples(path)
    done = measured_pairs(runs, samples)
    wanted = enough_samples(runs) if count is None else min(count, len(runs))
    if done:
        _say(f"{path} has {len(done)} of {wanted} runs")
    names = {load.model for run in runs for load in run}
    candidates = {name: candidate(offer) for name, offer in deployment.offered.items() if name in names}

    async def run_all(told: StepProgress) -> None:
        finished, left = len(done), max(0, wanted - len(done))
        grid = grid_of(kinds[0])
        found = measure_pairs(backend, candidates, runs, deployment.problem.profiles, done=done, count=left, grid=grid)
        async with aclosing(found):
            async for together in found:
                if isinstance(together, str):
                    raise ModelError(together)
                samples.extend(together)
                write_file(path, write_samples(samples), quiet=True)
                finished += 1
                told("co-located", finished, wanted)

    with progress_bars("running") as progress:
        asyncio.run(run_all(StepProgress(progress)))
    _say(f"{len(samples)} samples in {path}; `cotenant fit {path} --profiles PROFILES` fits a predictor to them")


def _say(text: str) -> None:
    aside.print(text, highlight=False, markup=False, soft_wrap=True)


def existing_samples(path: Path) -> list[Sample]:
    """Return the samples in a file that exists; none without a file. Raises ConfigError for any other content."""
    return read_samples_file(path) if path.exists() else []


def candidate(offer: ServableModel) -> Candidate:
    entry, info, rng = offer.entry, offer.info, np.random.default_rng(0)
    return Candidate(worker_model(entry, info), lambda rows: sample_inputs(entry, info, rows, rng))
