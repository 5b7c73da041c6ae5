"""Measure served models co-located with training steps on shares of processors: the runs of KACE's figure 6.3, live.

    python -m benchmarks.job_pairs --models FOLDER --out data/jobs/cpu [--runs 128] [--limit 540]

Each of the demo's models and each of the zoo's small training steps is profiled alone, on the half of the machine that
it gets beside another; then pairs of one of each run side by side, both always busy, through the workers and throttles
that serve. Nothing else may run meanwhile. Results are kept as they come, and another call goes on from there.
`cotenant reproduce kace/fig6_3_live` chooses pairs by what is in that folder.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from cotenant.backends import Backend
from cotenant.backends.cpu import Cpu
from cotenant.cli.pairs import existing_samples
from cotenant.config.problem import read_profiles_file
from cotenant.core.identity import DeviceId
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample, write_samples
from cotenant.profiling.grid import CPU_PAUSE, Candidate, Grid, measure_profiles
from cotenant.profiling.pairs import Run, measure_pairs, measured_pairs
from cotenant.worker.repository import describe, find_model, sample_inputs, worker_model
from cotenant.zoo import DEMO, build_models

KIND = "cpu"
SHARE = WHOLE // 2  # of each of the two
TRAINING = ("lenet_train", "resnet18_train", "mobilenet_v2_train", "alexnet_train")
BATCHES = (1, 4)
LONGEST = 0.6  # seconds alone; slower batches are left out
SEED = 0


def candidate(repository: Path, name: str) -> Candidate:
    entry = find_model(repository, name)
    info = describe(entry)
    rng = np.random.default_rng(SEED)
    return Candidate(worker_model(entry, info), lambda rows: sample_inputs(entry, info, rows, rng))


async def profiles_of(
    backend: Backend, candidates: dict[str, Candidate], known: dict[tuple[str, str], Profile]
) -> AsyncGenerator[Profile]:
    """Profile those that are not known, each in a worker of its own, so that its memory is its own."""
    grid = Grid(shares=(SHARE,), batches=BATCHES, seconds=0.3, longest=LONGEST, pause=CPU_PAUSE)
    for name, each in candidates.items():
        if (name, KIND) in known:
            continue
        points: list[Point] = []
        async with aclosing(measure_profiles(backend, {name: each}, device=DeviceId(KIND), grid=grid)) as results:
            async for _, point in results:
                if isinstance(point, str):
                    raise ModelError(f"{name} cannot be measured: {point}")
                points.append(point)
        yield Profile(name, KIND, points)


def runs_of(profiles: dict[tuple[str, str], Profile], count: int) -> list[Run]:
    """Return pairs of a served model and a training step, in an order of chance: any number of the first covers all."""

    def loads(names: Sequence[str]) -> list[Load]:
        return [
            Load(name, KIND, point.batch, SHARE)
            for name in names
            for point in profiles[name, KIND].points
            if point.latency <= LONGEST
        ]

    pairs = [(served, training) for served, training in itertools.product(loads(DEMO), loads(TRAINING))]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    return [pairs[i] for i in order.tolist()][:count]


async def measure(folder: Path, out: Path, count: int, limit: float) -> int:
    """Measure until all is there, or time is up; return how many runs are missing."""
    begun = time.monotonic()
    backend = Cpu()
    candidates = {name: candidate(folder, name) for name in (*DEMO, *TRAINING)}
    profile_file, pair_file = out / "profiles.csv", out / "pairs.csv"
    profiles = read_profiles_file(profile_file) if profile_file.exists() else {}
    async with aclosing(profiles_of(backend, candidates, profiles)) as found:
        async for profile in found:
            profiles[profile.model, KIND] = profile
            profile_file.write_text(write_profiles(profiles.values()))
            say(f"profiled {profile.model}", begun)
            if time.monotonic() - begun > limit:
                return count
    runs = runs_of(profiles, count)
    samples: list[Sample] = existing_samples(pair_file)
    done = set(measured_pairs(runs, samples))
    grid = Grid(shares=(SHARE,), batches=BATCHES, pause=CPU_PAUSE)
    missing = [run for n, run in enumerate(runs) if n not in done]
    results = measure_pairs(
        backend, candidates, missing, profiles, count=len(missing), grid=grid, at_once=max(len(missing), 1)
    )
    left = len(missing)
    async with aclosing(results):
        async for together in results:
            if isinstance(together, str):
                raise ModelError(together)
            samples.extend(together)
            pair_file.write_text(write_samples(samples))
            left -= 1
            say(f"{len(runs) - left} of {len(runs)} runs", begun)
            if time.monotonic() - begun > limit:
                break
    return left


def provenance(runs: int) -> dict[str, object]:
    """Return what this machine and these versions are, when it begins, and what else runs then."""
    import onnxruntime
    import torch

    cpu = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    git = shutil.which("git") or "git"
    commit = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "onnxruntime": onnxruntime.__version__,
        "commit": commit,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2),
        "command": f"python -m benchmarks.job_pairs --runs {runs}",
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def say(text: str, begun: float) -> None:
    print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="Folder for the models; those missing are built.")
    parser.add_argument("--out", type=Path, default=Path("data/jobs/cpu"))
    parser.add_argument("--runs", type=int, default=128)
    parser.add_argument("--limit", type=float, default=540.0, help="Seconds after which no further run begins.")
    given = parser.parse_args()
    build_models(given.models, DEMO)
    build_models(given.models, TRAINING, torch=True)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "machine.json"
    before = msgspec.json.decode(file.read_bytes()) if file.exists() else []
    file.write_bytes(msgspec.json.format(msgspec.json.encode([*before, provenance(given.runs)]), indent=1) + b"\n")
    left = asyncio.run(measure(given.models, given.out, given.runs, given.limit))
    print(f"{left} runs are missing; run again to continue" if left else f"all runs are in {given.out}")


if __name__ == "__main__":
    main()
