"""Run a model for Nsight Compute to profile: `python -m cotenant.profiling.ncu_target MODEL BATCH...`.

It loads a model, runs each batch once to warm up and once under the counters, preceded by a marker kernel that nothing
else runs. MODEL is a file with a `WorkerModel` in JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cotenant.worker.runners import load_runner
from cotenant.worker.runners.arrays import Array, filled_inputs
from cotenant.worker.wire import WorkerModel


def run_batches(
    model: WorkerModel, run: Callable[[dict[str, Array]], object], batches: Sequence[int], gpu: CountingTask
) -> None:
    for rows in batches:
        inputs = filled_inputs(model, rows)
        run(inputs)
        gpu.start()
        gpu.mark()
        run(inputs)
        gpu.stop()


class CountingTask(Protocol):
    def start(self) -> None: ...

    def mark(self) -> None:
        """Run the marker kernel that separates batches."""
        ...

    def stop(self) -> None: ...


class CudaRuntime:
    """Call the runtime of the first visible CUDA device."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda  # not all that is called is typed

    def start(self) -> None:
        self._cuda.synchronize()
        self._cuda.profiler.start()

    def mark(self) -> None:
        self._cuda._sleep(1)

    def stop(self) -> None:
        self._cuda.synchronize()
        self._cuda.profiler.stop()


def main(file: str, *batches: str) -> None:
    model = msgspec.json.decode(Path(file).read_bytes(), type=WorkerModel)
    runner, _ = load_runner(model, threads=1, fake=False, stream=0)
    run_batches(model, runner.run, [int(batch) for batch in batches], CudaRuntime())


if __name__ == "__main__":
    main(*sys.argv[1:])
