"""What a model's kernels ask of a GPU, by Nsight Compute's counters: features for predictors.

As in KACE (RPE report, 2024, section 4.2) a batch is run alone on the whole device, and each metric is averaged over
its kernels, weighted by how long each ran. Nsight Compute runs a kernel several times, with empty caches, and cannot
look into MPS; so the figures are of one process on a device that has nothing else to do.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cotenant.core.profile import Point
from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError, ModelError
from cotenant.worker.wire import WorkerModel

TIME = "gpu__time_duration.sum"
# Nsight Compute's metric → column of a profile; those that KACE has go by the names of `experiments/data/kace.py`.
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_throughput_pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_throughput_pct",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_throughput_pct",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "l2_throughput_pct",
    "lts__t_sector_hit_rate.pct": "l2_hit_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_pct",
    "launch__registers_per_thread": "registers",
    "launch__thread_count": "threads",
    "launch__shared_mem_per_block_static": "static_shared_memory",
}
# What of a device a batch keeps in use while it runs, gaps between kernels included ← while a kernel runs.
USE = {"dram_util_pct": "dram_throughput_pct", "l2_util_pct": "l2_throughput_pct"}
BUSY = "sm_util_pct"  # the fraction of time in which a kernel runs
MARK = "spin_kernel"  # in the name of the kernel with which `profiling.counted` begins each batch

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS |= {"second": 1.0, "msecond": 1e-3, "usecond": 1e-6, "nsecond": 1e-9}  # as older versions write them
_BYTES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_PLAIN = {"", "%", "thread", "register/thread"}
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class Kernel(msgspec.Struct, frozen=True):
    """One launch. seconds: it ran. values: by columns of a profile; those that this GPU does not count are absent."""

    name: str
    seconds: float
    values: dict[str, float]


def parse_ncu(text: str) -> list[Kernel]:
    """Nsight Compute's CSV, in either form: a row for each metric of a kernel (``--page details``), or a column
    (``--page raw``, whose first row has the units). Lines before and after it are the program's and ncu's own. Raises
    DeviceError where there is no kernel, with what ncu says."""
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.reader(line for line in lines[start:] if line.startswith('"')) if row]
    if len(rows) < 2:
        raise DeviceError(f"Nsight Compute counted nothing: {_complaint(lines)}")
    header = rows[0]
    cells = [dict(zip(header, row, strict=False)) for row in rows[1:]]
    found = _long(cells) if "Metric Name" in header else _wide(cells)
    return [Kernel(name, seconds, values) for name, values in found if (seconds := values.pop(TIME, 0.0)) > 0]


def _long(cells: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in cells:
        _, values = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
        values |= _value(row["Metric Name"], row["Metric Value"], row["Metric Unit"])
    yield from kernels.values()


def _wide(cells: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    units, *kernels = cells
    for row in kernels:
        values: dict[str, float] = {}
        for metric in (TIME, *METRICS):
            values |= _value(metric, row.get(metric, ""), units.get(metric, ""))
        yield row["Kernel Name"], values


def _value(metric: str, text: str, unit: str) -> dict[str, float]:
    """A metric by its column, in seconds, bytes or as it is; nothing where it is none of ours, or was not counted."""
    if metric not in METRICS and metric != TIME:
        return {}
    try:
        number = float(text.replace(",", ""))
    except ValueError:  # "n/a", where a GPU, or a virtual machine, does not count it
        return {}
    if metric == TIME:
        if unit not in _SECONDS:
            raise DeviceError(f"Nsight Compute counts {metric} in {unit!r}, which is not known; it may be too new")
        return {TIME: number * _SECONDS[unit]}
    size = re.fullmatch(r"([KMG]?)byte(/block)?", unit)
    if size is None and unit not in _PLAIN:
        raise DeviceError(f"Nsight Compute counts {metric} in {unit!r}, which is not known; it may be too new")
    return {METRICS[metric]: number * (_BYTES[size[1]] if size else 1.0)}


def _complaint(lines: Sequence[str]) -> str:
    """What ncu says of why."""
    found = next((line for line in lines if line.startswith("==ERROR==")), "")
    if "NVGPUCTRPERM" in found:
        return (
            "this user may not read the counters; run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    return found.removeprefix("==ERROR==").strip() or (lines[-1].strip() if lines else "it wrote nothing")


def time_weighted(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Each column as an average over kernels, by how long they ran; of those that have it."""
    found = {}
    for column in METRICS.values():
        having = [kernel for kernel in kernels if column in kernel.values]
        if having:
            seconds = sum(kernel.seconds for kernel in having)
            found[column] = sum(kernel.seconds * kernel.values[column] for kernel in having) / seconds
    return found


def features(kernels: Sequence[Kernel], whole: float, latency: float) -> dict[str, float]:
    """Columns for a point of the batch that has these kernels. whole, latency: seconds that it takes on the whole
    device, and at the point.

    A batch moves the same bytes on any share: what it keeps in use of L2 and DRAM falls as it takes longer. The time in
    which no kernel runs stays as it is on the whole device.
    """
    found = time_weighted(kernels)
    running = sum(kernel.seconds for kernel in kernels)
    for column, source in USE.items():
        if source in found:
            found[column] = min(100.0, found[source] * running / latency)
    found[BUSY] = 100 * (1 - max(0.0, whole - running) / latency)
    return found


def with_counters(points: Sequence[Point], counted: Mapping[int, Sequence[Kernel]]) -> list[Point]:
    """A model's points with the features of its kernels. They were counted at some batches; others are taken to run the
    kernels of the nearest, for longer or shorter. Points whose batch has no latency on the whole device stay as they
    are."""
    whole = {point.batch: point.latency for point in points if point.share == WHOLE}
    known = [batch for batch in counted if batch in whole]
    found = []
    for point in points:
        if known and point.batch in whole:
            near = min(known, key=lambda batch: max(batch / point.batch, point.batch / batch))
            latency = point.latency * whole[near] / whole[point.batch]
            more = features(counted[near], whole[near], latency)
            if near == point.batch:
                more |= {"kernels": float(len(counted[near]))}
            point = msgspec.structs.replace(point, features={**point.features, **more})
        found.append(point)
    return found


def find_ncu() -> str:
    """Where Nsight Compute is. Raises DeviceError where it is not."""
    places = (str(path) for place in _PLACES for path in sorted(Path("/").glob(place.lstrip("/")), reverse=True))
    found = shutil.which("ncu") or next(places, None)
    if found is None:
        raise DeviceError("counters need Nsight Compute; install it, so that `ncu` is on the PATH")
    return found


def ncu_command(ncu: str, log: Path, model: Path, batches: Sequence[int]) -> list[str]:
    """Count the kernels of these batches of the model that is described in that file."""
    return [
        ncu,
        "--csv",
        "--page=raw",
        "--print-units=base",
        "--clock-control=none",  # a server's GPU keeps its clocks to itself
        "--profile-from-start=off",
        "--target-processes=all",
        f"--metrics={','.join((TIME, *METRICS))}",
        f"--log-file={log}",
        sys.executable,
        "-m",
        "cotenant.profiling.ncu_target",
        str(model),
        *map(str, batches),
    ]


def count_kernels(
    model: WorkerModel, batches: Sequence[int], *, seconds: float, ncu: str = ""
) -> dict[int, list[Kernel]]:
    """The kernels of one batch of each of these sizes, on the first CUDA device that this process shows others.

    seconds: after which ncu is given up. Raises DeviceError where ncu counts nothing, ModelError where the model fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "ncu.csv"), Path(folder, "model.json")
        file.write_bytes(msgspec.json.encode(model))
        try:
            failed, complaint = _run(ncu_command(ncu or find_ncu(), log, file, batches), seconds)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"Nsight Compute took longer than {seconds:.0f} s for {model.name!r}") from None
        text = log.read_text() if log.exists() else ""
    said = [line for line in complaint.splitlines() if line.strip()]
    if failed and said and '"ID"' not in text:
        raise ModelError(f"model {model.name!r} cannot be counted: {said[-1].strip()}")
    return kernels_by_batch(parse_ncu(text), batches)


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Status and errors. Nothing of it outlives this: the program that ncu starts would keep its memory on the GPU."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as running:
        try:
            _, complaint = running.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return running.returncode, complaint


def kernels_by_batch(kernels: Sequence[Kernel], batches: Sequence[int]) -> dict[int, list[Kernel]]:
    """The kernels of each batch: it begins with one that has MARK in its name. Raises DeviceError where some are
    missing."""
    found: list[list[Kernel]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            found.append([])
        elif found:
            found[-1].append(kernel)
    if len(found) != len(batches) or not all(found):
        raise DeviceError(f"Nsight Compute saw {sum(map(bool, found))} of {len(batches)} batches; is it too old?")
    return dict(zip(batches, found, strict=True))
