"""What Nsight Compute writes, and what becomes of it; and its command line, before a program that stands in for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from cotenant.core.profile import Point
from cotenant.errors import DeviceError, ModelError
from cotenant.predictors.linear import DRAM, L2
from cotenant.predictors.load_features import UTILISATION_COLUMNS
from cotenant.profiling import counters, ncu_target
from cotenant.profiling.counters import (
    Kernel,
    count_kernels,
    features,
    kernels_by_batch,
    parse_ncu,
    time_weighted,
    with_counters,
)
from cotenant.worker.runners.arrays import Array
from tests.cli.program import alive
from tests.worker import graphs

# Two kernels, as ncu 2025.3 writes them with --page raw; shortened by columns and by the length of names.
RAW = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 3 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum","launch__registers_per_thread",\
"launch__shared_mem_per_block_static","launch__thread_count","lts__t_sectors.avg.pct_of_peak_sustained_elapsed"
"","","","","","","","","","","","%","ns","register/thread","byte/block","thread","%"
"0","4242","python3.12","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"0","1,184","16","0","1","0.01"
"1","4242","python3.12","127.0.0.1","sm90_xmma_fprop(Params, ""x"")","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"12.5","30,000","168","1,024","50,688","40"
"2","4242","python3.12","127.0.0.1","void at::native::relu<4>(int)","1","13","(128, 1, 1)","(98, 1, 1)","0","9.0",\
"n/a","10,000","32","0","12,544","20"
==PROF== Disconnected from process 4242
"""

# The same kernels with --page details and units as ncu chooses them.
LONG = """\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"1","4242","python3.12","127.0.0.1","fprop","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","gpu__time_duration.sum","us","30.00"
"1","4242","python3.12","127.0.0.1","fprop","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","launch__shared_mem_per_block_static","Kbyte/block","1.02"
"1","4242","python3.12","127.0.0.1","fprop","1","13","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","sm__inst_executed.sum","inst","1,000"
"""


def test_parse_ncu_column_per_metric_gives_kernels() -> None:
    mark, first, second = parse_ncu(RAW)
    assert mark.name.endswith("spin_kernel(long)") and mark.seconds == pytest.approx(1.184e-6)
    assert first == Kernel(
        'sm90_xmma_fprop(Params, "x")',
        pytest.approx(3e-5),  # type: ignore[arg-type]
        {
            "dram_throughput_pct": 12.5,
            "registers": 168,
            "static_shared_memory": 1024,
            "threads": 50688,
            "l2_throughput_pct": 40,
        },
    )
    assert "dram_throughput_pct" not in second.values


def test_parse_ncu_row_per_metric_gives_kernels() -> None:
    (kernel,) = parse_ncu(LONG)
    assert kernel.name == "fprop" and kernel.seconds == pytest.approx(3e-5)
    assert kernel.values == {"static_shared_memory": pytest.approx(1020)}


def test_parse_ncu_errors_give_the_remedy() -> None:
    text = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\n"
    with pytest.raises(DeviceError, match=r"counted nothing: this user may not read the counters; run as root"):
        parse_ncu(text)
    with pytest.raises(DeviceError, match="counted nothing: it wrote nothing"):
        parse_ncu("")
    with pytest.raises(DeviceError, match=r"gpu__time_duration.sum in 'fortnight', which is an unknown unit"):
        parse_ncu(RAW.replace('"ns"', '"fortnight"'))


def test_time_weighted_kernels_count_by_duration() -> None:
    _, *kernels = parse_ncu(RAW)
    found = time_weighted(kernels)
    assert found["registers"] == pytest.approx((3 * 168 + 32) / 4)
    assert found["l2_throughput_pct"] == pytest.approx((3 * 40 + 20) / 4)
    assert found["dram_throughput_pct"] == 12.5  # the other was not counted


def test_kernel_features_on_a_smaller_share_use_less_of_the_device() -> None:
    kernels = [Kernel("k", 0.002, {"dram_throughput_pct": 60.0, "l2_throughput_pct": 30.0})]
    whole = features(kernels, 0.003, 0.003)
    assert whole[DRAM] == pytest.approx(40) and whole[L2] == pytest.approx(20)
    assert whole[counters.BUSY] == pytest.approx(100 * 2 / 3)
    half = features(kernels, 0.003, 0.006)
    assert half[DRAM] == pytest.approx(20)
    assert half[counters.BUSY] == pytest.approx(100 * 5 / 6)
    assert features(kernels, 0.001, 0.001)[counters.BUSY] == 100  # counting slows kernels down
    assert {*counters.METRICS.values(), *counters.UTILISATION, counters.BUSY} >= set(UTILISATION_COLUMNS)


def test_with_counters_points_get_features_of_the_nearest_batch() -> None:
    points = [
        Point(share=share, batch=batch, latency=0.001 * batch * 1000 / share, memory=1, features={"cpu_ms": 1.0})
        for share in (500, 1000)
        for batch in (1, 2, 16)
    ]
    kernels = {batch: [Kernel("k", 0.0005 * batch, {"dram_throughput_pct": 10.0 * batch})] * 1 for batch in (1, 16, 64)}
    found = {(point.share, point.batch): point.features for point in with_counters(points, kernels)}
    assert found[1000, 1][DRAM] == pytest.approx(5) and found[1000, 16][DRAM] == pytest.approx(80)
    assert found[1000, 2][DRAM] == pytest.approx(5)  # as a batch of one has it, which runs for as much of its time
    assert found[500, 16][DRAM] == pytest.approx(40)
    assert found[500, 16]["kernels"] == 1 and "kernels" not in found[1000, 2]
    assert all(values["cpu_ms"] == 1 for values in found.values())
    assert with_counters(points[:3], kernels) == points[:3]


def test_batches_are_separated_by_the_marker_kernel() -> None:
    mark, first, second = parse_ncu(RAW)
    assert kernels_by_batch([first, mark, first, second, mark, second], (1, 8)) == {1: [first, second], 8: [second]}
    with pytest.raises(DeviceError, match="saw 1 of 2 batches"):
        kernels_by_batch([mark, first], (1, 8))


def stand_in(folder: Path, body: str) -> str:
    """A program with ncu's command line: it finds `log`, and the command that it is to run as `rest`."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        'log = next(it for it in sys.argv if it.startswith("--log-file=")).partition("=")[2]\n'
        f'rest = sys.argv[sys.argv.index("cotenant.profiling.ncu_target") - 2:]\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


def test_count_kernels_of_a_model_returns_its_batches(tmp_path: Path) -> None:
    lines = RAW.splitlines()
    twice = "\n".join([*lines[:6], *lines[4:6]])  # each batch: the mark and a kernel
    asked = "json.load(open(rest[3]))['name'], rest[4:]"
    body = f"assert ({asked}) == ('identity', ['1', '8'])\nopen(log, 'w').write('''{twice}''')"
    found = count_kernels(graphs.identity(tmp_path / "model.onnx"), (1, 8), seconds=20, ncu=stand_in(tmp_path, body))
    assert {batch: len(kernels) for batch, kernels in found.items()} == {1: 1, 8: 1}


def test_count_kernels_of_a_failing_model_names_it(tmp_path: Path) -> None:
    """ncu says no more than that the program failed; the program says why."""
    body = "open(log, 'w').write('==ERROR== The application returned an error code (1).')\nsys.exit('no such layer')"
    with pytest.raises(ModelError, match=r"'identity' cannot be counted: no such layer"):
        count_kernels(graphs.identity(tmp_path / "m.onnx"), (1,), seconds=20, ncu=stand_in(tmp_path, body))


def test_count_kernels_beyond_its_time_ends_all_processes(tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\nsleep 60 2>&- & echo $! > {tmp_path}/pid\nwait\n")
    ncu.chmod(0o755)
    with pytest.raises(DeviceError, match=r"took longer than 1 s for 'identity'"):
        count_kernels(graphs.identity(tmp_path / "model.onnx"), (1,), seconds=0.6, ncu=str(ncu))
    if (tmp_path / "pid").exists():  # it had the time to start something
        pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 20
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)


def test_count_kernels_without_nsight_compute_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(counters, "_PLACES", ())
    with pytest.raises(DeviceError, match="counters need Nsight Compute"):
        counters.find_ncu()


class Told:
    """Keeps what is called: batches, and what counts them."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def run(self, inputs: dict[str, Array]) -> None:
        self.log.append(len(inputs["x"]))

    def start(self) -> None:
        self.log.append("start")

    def mark(self) -> None:
        self.log.append("mark")

    def stop(self) -> None:
        self.log.append("stop")


def test_count_kernels_counts_only_the_second_run_of_each_batch(tmp_path: Path) -> None:
    told = Told()
    ncu_target.run_batches(graphs.identity(tmp_path / "model.onnx"), told.run, (1, 8), told)
    assert told.log == [1, "start", "mark", 1, "stop", 8, "start", "mark", 8, "stop"]
