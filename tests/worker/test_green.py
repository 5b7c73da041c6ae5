"""Streams of green contexts, through the real cuda-bindings over the fake driver, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.driver.build import fitted

ROOT = Path(__file__).parents[2]

# What a script has at hand: `counts` of contexts, streams, streams that outlived their context, and splits;
# `groups` of a stream, as the driver has them.
BEGIN = """
import contextlib, ctypes, json, threading
from cotenant.errors import DeviceError
from cotenant.worker.green import Multiprocessors
processors = Multiprocessors()
library = ctypes.CDLL("libcuda.so.1")
library.cotenant_fake_groups.restype = ctypes.c_uint64
def counts():
    into = (ctypes.c_int * 5)()
    library.cotenant_fake_counts(into)
    return dict(contexts=into[0], streams=into[1], leaked=into[2], splits=into[4])
def groups(stream):
    bits = library.cotenant_fake_groups(ctypes.c_void_p(stream))
    return [group for group in range(64) if bits >> group & 1]
def out(value):
    print(json.dumps(value))
"""


def ran(script: str, gpus: str = "h200", **options: Any) -> list[Any]:
    """What it gave to `out`."""
    environment = {**os.environ, **fitted(gpus, **options)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("gpu", "sizes"),
    [
        ("h200", [8] * 16 + [4]),
        ("a100-80gb", [4] * 27),
        ("rtx4090", [4] * 32),
        ("v100", [2] * 40),
    ],
)
def test_green_device_is_split_into_minimum_groups(gpu: str, sizes: list[int]) -> None:
    assert ran("out(processors.sizes)", gpu) == [sizes]


def test_green_driver_without_a_minimum_size_is_split_equally() -> None:
    assert ran("out(processors.sizes)", driver="550.54/12.5") == [[8] * 16 + [4]]


def test_green_streams_run_on_the_requested_groups() -> None:
    told = ran("""
with processors.stream((0, 1, 2)) as one, processors.stream((5, 9)) as other, processors.stream((0, 1, 2)) as third:
    out([groups(one), groups(other), groups(third), len({one, other, third})])
with processors.stream(tuple(range(17))) as whole:
    out(groups(whole))
out(counts()["splits"])
""")
    assert told == [[[0, 1, 2], [5, 9], [0, 1, 2], 3], list(range(17)), 1]


def test_green_streams_and_contexts_are_created_once() -> None:
    told = ran("""
with processors.stream((0, 1)):
    first = counts()
seen = set()
for size in range(1, 16):  # any cut in two was foreseen
    with processors.stream(tuple(range(size))) as one, processors.stream(tuple(range(size, 16))) as other:
        seen |= {one, other}
    with processors.stream(tuple(range(size))) as one:
        seen.add(one)
out([first["contexts"], counts()["contexts"], len(seen), counts()["streams"], counts()["leaked"]])
""")
    first, contexts, seen, streams, leaked = told[0]
    assert (first, contexts) == (31, 31)
    assert seen == streams == 30 and leaked == 0


def test_green_unused_contexts_are_evicted(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("limit contexts 4\n")
    told = ran(
        """
with contextlib.ExitStack() as stack:
    for group in range(4):
        out(groups(stack.enter_context(processors.stream((group,)))))
    try:
        stack.enter_context(processors.stream((4,)))
    except DeviceError as error:
        out(str(error))
with processors.stream((4,)) as stream:
    out(groups(stream))
out(counts())
""",
        state=state,
    )
    assert told[:4] == [[0], [1], [2], [3]]
    assert told[4] == "cuGreenCtxCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    assert told[5] == [4]
    assert told[6] == {"contexts": 1, "streams": 1, "leaked": 0, "splits": 1}


def test_green_concurrent_requests_are_safe() -> None:
    told = ran("""
seen = []
def ask(group):
    with processors.stream((group,)) as stream:
        seen.append(groups(stream) == [group])
threads = [threading.Thread(target=ask, args=(group % 16,)) for group in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
out([len(seen), all(seen), counts()["splits"]])
""")
    assert told == [[64, True, 1]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"driver": "550.54/12.4"}, "green contexts need a driver with CUDA 12.5 or newer, and this one has 12.4; "),
        ({"errors": "cuInit 999"}, "cuInit: CUDA_ERROR_UNKNOWN: unknown error"),
        ({"errors": "cuDevSmResourceSplitByCount 801"}, "cuDevSmResourceSplitByCount: CUDA_ERROR_NOT_SUPPORTED: "),
        ({"errors": "cuGreenCtxStreamCreate 2"}, "cuGreenCtxStreamCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    ],
)
def test_green_driver_error_is_named(options: dict[str, str], reason: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text(f"error {options['errors']}\n" if "errors" in options else "")
    (told,) = ran(
        """
try:
    processors.stream((0,)).__enter__()
except DeviceError as error:
    out(str(error))
""",
        driver=options.get("driver", ""),
        state=state,
    )
    assert told.startswith(reason)


def test_green_group_sizes_are_known_without_opening_the_device() -> None:
    ask = [sys.executable, "-m", "cotenant.worker.green"]
    there = {**os.environ, **fitted("h200,a100-80gb"), "CUDA_VISIBLE_DEVICES": "1"}
    assert json.loads(subprocess.run(ask, env=there, cwd=ROOT, capture_output=True, check=True).stdout) == [4] * 27
    absent = {**there, "CUDA_VISIBLE_DEVICES": "GPU-none"}
    failed = subprocess.run(ask, env=absent, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected\n"


def test_green_checks_of_a_real_gpu_run_over_the_fake_driver() -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_green.py", "-m", "gpu", "-p", "no:cacheprovider"]
    env = {**os.environ, **fitted("h200")}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
