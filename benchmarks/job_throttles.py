"""How should a job give way to batches on the same processors: by the kernel, between its steps, or by signals?

`python -m benchmarks.job_throttles [--model-repository DIR] [--scales X …] [--seconds S] [--rounds N] [--json]`

The demo's models are served, in turns, without a job and beside one that trains with PyTorch on all processors:

- *idle*: it runs under SCHED_IDLE, and the kernel alone decides;
- *pause*: besides, it waits between two steps while any lane is at work;
- *stop*: besides, it is stopped by a signal when the first lane begins a batch, until the last has ended its own.

All turns of a round get the same arrivals. Figures are those of `benchmarks.jobs`; a quiet machine is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.adaptive import Segment, send
from benchmarks.harness import show_result
from benchmarks.jobs import BATCH, AtScale, Turns, busy_seconds, compared, serving_demo
from cotenant.core.identity import LaneId
from cotenant.live.foreign_load import available_cores
from cotenant.live.lending import Lending
from cotenant.worker.background import LOWEST_PRIORITY
from cotenant.worker.jobs.process_tree import processor_seconds

MODES = ("idle", "pause", "stop")
LOOK = 0.0005  # seconds between two looks of a job that waits


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    at: AtScale


class LanesAtWork:
    """Know which lanes are at work. stopped: the process that is stopped meanwhile, 0 for none."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("lanes")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self.stopped = 0
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._lanes: set[LaneId] = set()
        tell = Lending.has_work

        def has_work(lending: Lending, lane: LaneId, at_work: bool) -> None:
            tell(lending, lane, at_work)
            self._tell(lane, at_work)

        Lending.has_work = has_work  # type: ignore[assignment,method-assign]

    def _tell(self, lane: LaneId, at_work: bool) -> None:
        before = bool(self._lanes)
        (self._lanes.add if at_work else self._lanes.discard)(lane)
        if (now := bool(self._lanes)) != before:
            self._memory[0] = now
            if self.stopped:
                os.kill(self.stopped, signal.SIGSTOP if now else signal.SIGCONT)


def train(descriptor: int, threads: int) -> None:
    """Train in the background until standard input ends. descriptor: memory whose first byte says to wait; -1: none."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    wait = mmap.mmap(descriptor, mmap.PAGESIZE) if descriptor >= 0 else bytes(1)
    layers = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters())
    images, labels = torch.rand(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))
    os.set_blocking(sys.stdin.fileno(), False)
    steps = 0
    while os.getppid() != 1:
        while wait[0]:
            time.sleep(LOOK)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 1:
            print("training", flush=True)
        with contextlib.suppress(BlockingIOError):
            if not os.read(sys.stdin.fileno(), 1):
                print(steps)
                return


@asynccontextmanager
async def training(mode: str, lanes: LanesAtWork) -> AsyncIterator[int]:
    """Run a job within the block; yield its process id."""
    threads = str(len(available_cores()))
    descriptor = str(lanes.descriptor if mode == "pause" else -1)
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.job_throttles", "--train", descriptor, threads),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=(lanes.descriptor,),
        env={**os.environ, **environment},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        await process.stdout.readline()
        lanes.stopped = process.pid if mode == "stop" else 0
        yield process.pid
    finally:
        lanes.stopped = 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        await process.wait()


async def turn(address: str, rates: Mapping[str, float], seconds: float, seed: int, pid: int | None) -> Turns:
    await asyncio.sleep(1.0)
    begun, busy, used = time.monotonic(), busy_seconds(), 0.0 if pid is None else processor_seconds([pid])
    end = (await send(address, [Segment(seconds, dict(rates))], seed))[-1]
    passed = time.monotonic() - begun
    idle = max(passed * len(available_cores()) - (busy_seconds() - busy), 0.0)
    spent = 0.0 if pid is None else processor_seconds([pid]) - used
    return Turns(models=end.models, seconds=passed, idle=idle, job=spent)


async def measure(repository: Path, scales: Sequence[float], seconds: float, rounds: int) -> list[Compared]:
    lanes = LanesAtWork()
    found = []
    async with serving_demo(repository) as (server, _, rates):
        for scale in scales:
            asked = {name: rate * scale for name, rate in rates.items()}
            turns: dict[str, list[Turns]] = {mode: [] for mode in ("", *MODES)}
            for seed in range(rounds):
                for mode in list(turns) if seed % 2 == 0 else list(turns)[::-1]:
                    if not mode:
                        turns[mode].append(await turn(server.addresses.http, asked, seconds, 1000 + seed, None))
                        continue
                    async with training(mode, lanes) as pid:
                        turns[mode].append(await turn(server.addresses.http, asked, seconds, 1000 + seed, pid))
            found += [Compared(mode=mode, at=compared(scale, turns[""], turns[mode])) for mode in MODES]
    return found


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-repository", type=Path, default=Path("models"))
    parser.add_argument("--scales", type=float, nargs="+", default=[0.3, 0.9])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = uvloop.run(measure(args.model_repository, args.scales, args.seconds, args.rounds))
    lines = [
        f"{each.at.scale * 100:.0f} %, {each.mode:<5} p99 × {each.at.p99.show(digits=3)}, attainment "
        f"{each.at.attainment.show(100)} points, got {each.at.got.show(100, 1)} % of what was idle"
        for each in found
    ]
    show_result({"compared": found}, *lines)


if __name__ == "__main__":
    main()
