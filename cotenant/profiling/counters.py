"""Measure kernel counters with Nsight Compute, as features for interference predictors.

As in KACE (RPE report, 2024, section 4.2), a batch runs alone on the whole device, and each metric is averaged over its
kernels, weighted by their duration. Nsight Compute replays a kernel several times with flushed caches and cannot look
into MPS, so the figures are those of one process on an otherwise idle device.
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
# Nsight Compute's metric → column of a profile; those that KACE has go by the names of `cotenant/published/kace.py`.
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
# Utilisation over a whole batch, gaps between kernels included ← utilisation while a kernel runs.
UTILISATION = {"dram_util_pct": "dram_throughput_pct", "l2_util_pct": "l2_throughput_pct"}
BUSY = "sm_util_pct"  # percent of the time in which a kernel runs
MARKER = "spin_kernel"  # in the name of the kernel with which `profiling.ncu_target` begins each batch

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS |= {"second": 1.0, "msecond": 1e-3, "usecond": 1e-6, "nsecond": 1e-9}  # as older versions write them
_BYTES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_PLAIN = {"", "%", "thread", "register/thread"}
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class Kernel(msgspec.Struct, frozen=True):
    """Describe one kernel launch.

    seconds: duration. values: by profile column, without those that the GPU does not count.
    """

    name: str
    seconds: float
    values: dict[str, float]


def parse_ncu(text: str) -> list[Kernel]:
    """Parse Nsight Compute's CSV: a row for each metric of a kernel (``--page details``), or a column (``--page raw``,
    whose first row has the units).

    Lines before and after are output of the program and of ncu. Raises DeviceError, with ncu's message, if no kernel
    was counted.
    """
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.reader(line for line in lines[start:] if line.startswith('"')) if row]
    if len(rows) < 2:
        raise DeviceError(f"Nsight Compute counted nothing: {_complaint(lines)}")
    header = rows[0]
    cells = [dict(zip(header, row, strict=False)) for row in rows[1:]]
    kernels = _long(cells) if "Metric Name" in header else _wide(cells)
    return [Kernel(name, seconds, values) for name, values in kernels if (seconds := values.pop(TIME, 0.0)) > 0]


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
    """Return a metric by its column, in seconds or bytes; empty for other metrics, or if it was not counted."""
    if metric not in METRICS and metric != TIME:
        return {}
    try:
        number = float(text.replace(",", ""))
    except ValueError:  # "n/a" if the GPU or the virtual machine does not count it
        return {}
    if metric == TIME:
        if unit not in _SECONDS:
            raise DeviceError(
                f"Nsight Compute counts {metric} in {unit!r}, which is an unknown unit; it may be too new"
            )
        return {TIME: number * _SECONDS[unit]}
    size = re.fullmatch(r"([KMG]?)byte(/block)?", unit)
    if size is None and unit not in _PLAIN:
        raise DeviceError(f"Nsight Compute counts {metric} in {unit!r}, which is not known; it may be too new")
    return {METRICS[metric]: number * (_BYTES[size[1]] if size else 1.0)}


def _complaint(lines: Sequence[str]) -> str:
    """Return ncu's own error message."""
    error = next((line for line in lines if line.startswith("==ERROR==")), "")
    if "NVGPUCTRPERM" in error:
        return (
            "this user may not read the counters; run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    return error.removeprefix("==ERROR==").strip() or (lines[-1].strip() if lines else "it wrote nothing")


def time_weighted(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Average each column over the kernels that have it, weighted by duration."""
    averages = {}
    for column in METRICS.values():
        counted = [kernel for kernel in kernels if column in kernel.values]
        if counted:
            seconds = sum(kernel.seconds for kernel in counted)
            averages[column] = sum(kernel.seconds * kernel.values[column] for kernel in counted) / seconds
    return averages


def features(kernels: Sequence[Kernel], whole: float, latency: float) -> dict[str, float]:
    """Return the profile columns of a batch with these kernels.

    whole, latency: seconds on the whole device and at the point. A batch moves the same bytes on any share, so its L2
    and DRAM utilisation falls as its latency grows; the time without a running kernel is that on the whole device.
    """
    columns = time_weighted(kernels)
    running = sum(kernel.seconds for kernel in kernels)
    for column, source in UTILISATION.items():
        if source in columns:
            columns[column] = min(100.0, columns[source] * running / latency)
    columns[BUSY] = 100 * (1 - max(0.0, whole - running) / latency)
    return columns


def with_counters(points: Sequence[Point], counted: Mapping[int, Sequence[Kernel]]) -> list[Point]:
    """Return a model's points with the features of its kernels.

    counted: kernels by batch. Other batches are assumed to run the kernels of the nearest one, scaled in time. Points
    whose batch has no latency on the whole device are unchanged.
    """
    whole = {point.batch: point.latency for point in points if point.share == WHOLE}
    usable = [batch for batch in counted if batch in whole]
    extended = []
    for point in points:
        if usable and point.batch in whole:
            near = min(usable, key=lambda batch: max(batch / point.batch, point.batch / batch))
            latency = point.latency * whole[near] / whole[point.batch]
            more = features(counted[near], whole[near], latency)
            if near == point.batch:
                more |= {"kernels": float(len(counted[near]))}
            point = msgspec.structs.replace(point, features={**point.features, **more})
        extended.append(point)
    return extended


def find_ncu() -> str:
    """Return the path of Nsight Compute. Raises DeviceError if it is not installed."""
    places = (str(path) for place in _PLACES for path in sorted(Path("/").glob(place.lstrip("/")), reverse=True))
    found = shutil.which("ncu") or next(places, None)
    if found is None:
        raise DeviceError("counters need Nsight Compute; install it, so that `ncu` is on the PATH")
    return found


def ncu_command(ncu: str, log: Path, model: Path, batches: Sequence[int]) -> list[str]:
    """Return the command that counts the kernels of these batches of the model described in a file."""
    return [
        ncu,
        "--csv",
        "--page=raw",
        "--print-units=base",
        "--clock-control=none",  # leave the clocks of the GPU alone
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
    """Count the kernels of one batch of each size on the first visible CUDA device.

    seconds: time limit for ncu. Raises DeviceError if ncu counts nothing, ModelError if the model fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "ncu.csv"), Path(folder, "model.json")
        file.write_bytes(msgspec.json.encode(model))
        try:
            failed, complaint = _run(ncu_command(ncu or find_ncu(), log, file, batches), seconds)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"Nsight Compute took longer than {seconds:.0f} s for {model.name!r}") from None
        text = log.read_text() if log.exists() else ""
    errors = [line for line in complaint.splitlines() if line.strip()]
    if failed and errors and '"ID"' not in text:
        raise ModelError(f"model {model.name!r} cannot be counted: {errors[-1].strip()}")
    return kernels_by_batch(parse_ncu(text), batches)


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command; return its status and errors. The whole process group ends, as a leftover would hold GPU
    memory."""
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
    """Split kernels into batches at the marker kernels. Raises DeviceError if a batch is missing."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    if len(groups) != len(batches) or not all(groups):
        raise DeviceError(f"Nsight Compute saw {sum(map(bool, groups))} of {len(batches)} batches; is it too old?")
    return dict(zip(batches, groups, strict=True))
