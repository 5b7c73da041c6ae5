"""Write a small PyTorch model in all three file formats, for benchmarks and tests."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from cotenant.core.tensor import TensorSpec
from cotenant.worker.wire import WorkerModel

KINDS = {"pytorch_libtorch": "model.pt", "pytorch_export": "model.pt2", "pytorch_module": "model.py"}

SOURCE = '''
import torch


class Double(torch.nn.Module):
    """Return y = 2 x and its sum."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = self.factor * x
        return y, y.sum(1, keepdim=True)
'''


def double(folder: Path, platform: str, **fields: object) -> WorkerModel:
    """Write y = 2 x of two numbers, and total = their sum."""
    path = folder / KINDS[platform]
    if platform == "pytorch_module":
        path.write_text(SOURCE)
    else:
        scope: dict[str, type[torch.nn.Module]] = {}
        exec(SOURCE, scope)  # noqa: S102 the same module, saved in another way
        module, example = scope["Double"](), (torch.ones(2, 2),)
        if platform == "pytorch_export":
            rows = ({0: torch.export.Dim.DYNAMIC},)
            torch.export.save(torch.export.export(module, example, dynamic_shapes=rows), path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.jit.trace(module, example).save(str(path))
    return written(path, platform, **fields)


def written(path: Path, platform: str, **fields: object) -> WorkerModel:
    """Describe the model file to a worker: input `x`, outputs `y` and `total`, and `fields` on top."""
    known: dict[str, object] = {
        "name": "m",
        "max_batch": 8,
        "inputs": (TensorSpec("x", "FP32", (-1, 2)),),
        "outputs": (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("total", "FP32", (-1, 1))),
    }
    return WorkerModel(path=str(path), platform=platform, **(known | fields))  # type: ignore[arg-type]
