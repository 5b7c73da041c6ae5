"""Small PyTorch models that tests run for real, besides those of the benchmarks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.torch_models import KINDS as KINDS
from benchmarks.torch_models import SOURCE as SOURCE
from benchmarks.torch_models import double as double
from benchmarks.torch_models import written as written
from cotenant.worker.wire import WorkerModel


def python(folder: Path, source: str, **fields: object) -> WorkerModel:
    """A model of one input `x` and the outputs `y` and `total`, all but `fields`."""
    path = folder / "model.py"
    path.write_text(source)
    return written(path, "pytorch_module", **fields)
