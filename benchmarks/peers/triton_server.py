"""Serve a model with Triton's Python backend, as `nvidia-pytriton` brings both along: `python -m
benchmarks.peers.triton_server MODEL PORT`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytriton

from benchmarks.peers.model import BATCH, DELAY

CONFIG = """
backend: "python"
max_batch_size: %d
dynamic_batching { max_queue_delay_microseconds: %d }
input [ { name: "x", data_type: TYPE_FP32, dims: [ 16 ] } ]
output [ { name: "y", data_type: TYPE_FP32, dims: [ 16 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""
MODEL = """
import sys
sys.path[:0] = %r
import numpy as np
import triton_python_backend_utils as pb_utils
from model_of_peers import run

class TritonPythonModel:
    def execute(self, requests):
        parts = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        rows = run(%r, np.concatenate(parts))
        answers, start = [], 0
        for part in parts:
            end = start + len(part)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", rows[start:end])]))
            start = end
        return answers
"""


def main(model: str, port: int) -> None:
    package = Path(pytriton.__file__).parent
    root = Path(tempfile.mkdtemp())  # whoever runs this removes it: the process becomes Triton
    folder = root / "models" / model / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL % ([str(package.parent), str(folder)], model))
    shutil.copy(Path(__file__).with_name("model.py"), folder / "model_of_peers.py")
    (folder.parent / "config.pbtxt").write_text(CONFIG % (BATCH, DELAY * 1e6))
    shutil.copytree(package / "tritonserver" / "backends", root / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, root / "backends" / "python")
    libraries = package.parent / "nvidia_pytriton.libs"
    program = package / "tritonserver" / "bin" / "tritonserver"
    ports = (f"--{front}-port={port + number}" for number, front in enumerate(("http", "grpc", "metrics")))
    environ = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    words = (str(program), f"--model-repository={root / 'models'}", f"--backend-directory={root / 'backends'}", *ports)
    os.execve(program, words, environ)  # noqa: S606  # of the package


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
