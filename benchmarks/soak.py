"""Does a server lose requests, descriptors, threads or memory over a long time under faults?

`python -m benchmarks.soak [--minutes M] [--rate R] [--seed S] [--json]`

One `cotenant serve` answers callers over HTTP (JSON and binary) and gRPC (calls and streams) at a low rate, among them
bad requests and callers that leave. Meanwhile workers are killed and stopped, settings with other rates are read, and a
model is loaded and unloaded. Each valid request must get one right answer or an error with a reason.
Descriptors, threads and memory (proportional set size) of the server and of its workers, per process, are compared
between the second and the last quarter of the run. Exits with 1 where anything was lost or wrong, or did not stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import onnx_models
from benchmarks.harness import pss, tree
from benchmarks.soak_traffic import WIDTH, Callers
from cotenant.core.profile import Point, Profile, write_profiles

SAMPLE = 10.0  # seconds between two samples
KILL, FREEZE, RELOAD, LOAD = 20.0, 47.0, 61.0, 29.0  # seconds between two faults of a kind
FROZEN = 8.0  # seconds that a worker is stopped: longer than a batch may hang
RATES = (
    {"echo": 5, "wide": 5, "images": 1},
    {"echo": 60, "wide": 2, "images": 6},
    {"echo": 1, "wide": 30, "images": 2},
)
# How much a figure may grow from the second to the last quarter: a part of it, and an amount.
TOLERATED = {"descriptors": (0.0, 6.0), "threads": (0.0, 4.0), "memory": (0.05, 4.0)}


class Sample(msgspec.Struct, frozen=True):
    """Descriptors, threads and MiB of the server's process, and the means of those of its workers."""

    server: dict[str, float]
    workers: dict[str, float]


class Growth(msgspec.Struct, frozen=True):
    """Medians of a figure in the second and the last quarter of a run."""

    before: float
    after: float
    flat: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """answered: by kind of request and outcome. lost: requests without an answer. wrong: answers that are not right, or
    errors that say nothing; examples: of both. faults: by kind. growth: by process and figure. exit_status: of the
    server after SIGTERM. left: its processes after that. tracebacks: in its log."""

    minutes: float
    requests: int
    answered: dict[str, int]
    lost: int
    wrong: int
    examples: list[str]
    faults: dict[str, int]
    growth: dict[str, Growth]
    exit_status: int
    left: int
    tracebacks: int
    load_average: float

    @property
    def good(self) -> bool:
        clean = self.exit_status == 0 and not self.left and not self.tracebacks
        return clean and not self.lost and not self.wrong and all(each.flat for each in self.growth.values())


def write_settings(root: Path, rates: dict[str, int]) -> None:
    lines = [
        'model_repository = "models"',
        'profiles = "profiles.csv"',
        f'state = "{root}/state.sqlite"',
        "[cpu]",
        "cuts = [10, 20, 30, 40, 50, 60, 80, 100]",
    ]
    for name, rate in rates.items():
        lines += ["[[models]]", f'name = "{name}"', 'slo = "5s"', f"rate = {rate}"]
    (root / "settings.toml").write_text("\n".join(lines) + "\n")


def write_models(root: Path) -> None:
    makers: dict[str, Callable[[Path], object]] = {
        "echo": onnx_models.identity,
        "wide": lambda path: onnx_models.identity(path, WIDTH),
        "images": lambda path: onnx_models.convolutions(path, layers=2),
    }
    for name, make in makers.items():
        folder = root / "models" / name / "1"
        folder.mkdir(parents=True)
        make(folder / "model.onnx")
    points = [
        Point(share=share, batch=batch, latency=0.004 * batch * 1000 / share, memory=32 << 20)
        for share in (100, 1000)
        for batch in (1, 8)
    ]
    (root / "profiles.csv").write_text(write_profiles([Profile(name, "cpu", points) for name in makers]))
    write_settings(root, RATES[0])


def figures(pid: int) -> dict[str, float]:
    threads = Path(f"/proc/{pid}/status").read_text().split("Threads:")[1].split()[0]
    return {
        "descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
        "threads": float(threads),
        "memory": pss(pid) / 2**20,
    }


def sample(pid: int) -> Sample:
    workers = []
    for worker in workers_of(pid):
        try:
            workers.append(figures(worker))
        except (OSError, IndexError):
            continue  # it exited meanwhile
    names = TOLERATED if workers else ()
    return Sample(figures(pid), {name: statistics.fmean(each[name] for each in workers) for name in names})


def workers_of(pid: int) -> list[int]:
    """Return the worker processes of a server that serve a lane or are about to, but not pre-started ones."""
    found = []
    for each in tree(pid):
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes()
        except OSError:
            continue
        if b"cotenant.worker.main" in command or b"cotenant.worker.prestart" in command:
            found.append(each)
    return found


def growth(samples: list[Sample]) -> dict[str, Growth]:
    quarter = max(1, len(samples) // 4)
    second, last = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    grown = {}
    for process in ("server", "workers"):
        for name, (part, amount) in TOLERATED.items():
            before, after = (
                statistics.median(each) if (each := _values(some, process, name)) else 0.0 for some in (second, last)
            )
            grown[f"{process} {name}"] = Growth(before, after, after <= before * (1 + part) + amount)
    return grown


def _values(samples: list[Sample], process: str, name: str) -> list[float]:
    return [values[name] for each in samples if (values := getattr(each, process))]


class Faults:
    """What happens to the server besides its callers."""

    def __init__(self, pid: int, root: Path, callers: Callers, rng: np.random.Generator) -> None:
        self.counts: Counter[str] = Counter()
        self._pid = pid
        self._root = root
        self._callers = callers
        self._rng = rng
        self._frozen: set[int] = set()

    async def kill(self) -> None:
        self._send(signal.SIGKILL)

    async def freeze(self) -> None:
        if (pid := self._send(signal.SIGSTOP)) is not None:
            await asyncio.sleep(FROZEN)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                self.counts["frozen workers replaced"] += 1

    async def reload(self) -> None:
        write_settings(self._root, RATES[int(self._rng.integers(len(RATES)))])
        os.kill(self._pid, signal.SIGHUP)
        self.counts["reload"] += 1

    async def load(self) -> None:
        """Unload a model, and load it again."""
        for verb in ("unload", "load"):
            status = await self._callers.control(f"/v2/repository/models/images/{verb}")
            self.counts[f"{verb} {status}"] += 1
            await asyncio.sleep(float(self._rng.uniform(1, 8)))

    def _send(self, number: signal.Signals) -> int | None:
        there = workers_of(self._pid)
        if not there:
            return None
        pid = there[int(self._rng.integers(len(there)))]
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        self.counts[number.name] += 1
        return pid

    async def every(self, seconds: float, fault: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(float(seconds * self._rng.uniform(0.5, 1.5)))
            await fault()


async def _keep_sampling(pid: int, samples: list[Sample]) -> None:
    while True:
        await asyncio.sleep(SAMPLE)
        samples.append(await asyncio.to_thread(sample, pid))


async def run(pid: int, addresses: dict[str, str], root: Path, minutes: float, rate: float, seed: int) -> Result:
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    async with Callers(addresses, rng) as callers:
        faults = Faults(pid, root, callers, rng)
        kinds = ((KILL, faults.kill), (FREEZE, faults.freeze), (RELOAD, faults.reload), (LOAD, faults.load))
        happening = [asyncio.create_task(faults.every(seconds, fault)) for seconds, fault in kinds]
        happening.append(asyncio.create_task(_keep_sampling(pid, samples)))
        await callers.call(60 * minutes, rate)
        for task in happening:
            task.cancel()
        ended = await asyncio.gather(*happening, return_exceptions=True)
        for failed in ended:
            if isinstance(failed, Exception):
                raise failed
        await callers.finish()
    return Result(
        minutes=minutes,
        requests=callers.sent,
        answered=dict(sorted(callers.answered.items())),
        lost=len(callers.lost),
        wrong=len(callers.wrong),
        examples=callers.lost[:10] + callers.wrong[:10],
        faults=dict(faults.counts),
        growth=growth(samples),
        exit_status=0,
        left=0,
        tracebacks=0,
        load_average=os.getloadavg()[0],
    )


def measure(minutes: float, rate: float, seed: int) -> Result:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_models(root)
        ports = [f"--{front}-port=0" for front in ("http", "grpc", "metrics")]
        command = [sys.executable, "-m", "cotenant", "serve", str(root / "settings.toml"), *ports, "--json"]
        log = root / "log"
        with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                if not line:
                    sys.exit(f"the server did not start: {log.read_text()}")
                addresses = json.loads(line)["addresses"]
                result = asyncio.run(run(server.pid, addresses, root, minutes, rate, seed))
                processes = set(tree(server.pid)) - {server.pid}
            finally:
                server.terminate()
                status = server.wait(60)
        left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        tracebacks = log.read_text().count("Traceback (most recent call last)")
        if tracebacks:
            sys.stderr.write(log.read_text()[-20_000:])
        return msgspec.structs.replace(result, exit_status=status, left=len(left), tracebacks=tracebacks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=30.0, help="Requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.minutes, options.rate, options.seed)
    if options.json:
        print(msgspec.json.encode(result).decode())
    else:
        grown = "; ".join(
            f"{name} {each.before:.1f} to {each.after:.1f}{'' if each.flat else ' (NOT FLAT)'}"
            for name, each in result.growth.items()
        )
        print(
            f"{result.requests} requests in {result.minutes:g} min, {result.lost} lost and {result.wrong} "
            f"wrong; faults {result.faults}; answers {result.answered}; {grown}; exit status {result.exit_status}, "
            f"{result.left} processes left, {result.tracebacks} tracebacks; load average {result.load_average:.1f}"
        )
    sys.exit(0 if result.good else 1)


if __name__ == "__main__":
    main()
