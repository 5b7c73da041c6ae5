"""Read the tables of the published program from its files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from cotenant.errors import ConfigError
from experiments.gpulet import paper
from experiments.gpulet.published.arithmetic import LARGEST_BATCH, f32
from experiments.gpulet.published.tables import Model, Tables

# The program's names of the paper's models, in the order of its scenarios; ties follow it too (1.11).
MODEL_NAMES = (
    "lenet1",
    "googlenet",
    "resnet50",
    "ssd-mobilenetv1",
    "vgg16",
    "mnasnet1_0",
    "mobilenet_v2",
    "densenet161",
    "bert",
)


def read_tables(latency: Path, resource: Path) -> Tables:
    """Read the paper's nine models on the RTX 2080 Ti.

    latency: a table (model, share, batch, ms); resource: that folder of the published program, with measured
    utilisation, memory and overhead. Raises ConfigError for missing files or models.
    """
    rows: dict[str, dict[tuple[int, int], float]] = {}
    for name, part, batch, ms in _rows(latency):
        rows.setdefault(name, {})[int(part), int(batch)] = float(ms)
    l2: dict[str, dict[int, float]] = {}
    dram: dict[str, dict[int, float]] = {}
    for bench, batch, _, _, l2_percent, dram_percent, *_ in _rows(resource / "2080ti/UTIL.CSV")[1:]:
        l2.setdefault(bench, {})[int(batch)] = float(l2_percent)
        dram.setdefault(bench, {})[int(batch)] = float(dram_percent)
    memory = {entry["name"]: entry["mem"] for entry in json.loads(_text(resource / "mem-config.json"))["models"]}
    images = _overhead(resource / "3_224_224.txt", 1.9)
    overheads = {
        "lenet1": dict.fromkeys(range(1, LARGEST_BATCH + 1), 0.4),
        "ssd-mobilenetv1": _overhead(resource / "3_300_300.txt", 2.5),
        "bert": dict.fromkeys(range(1, LARGEST_BATCH + 1), 1.0),
    }
    inputs = {"lenet1": 28 * 28 * 4, "ssd-mobilenetv1": 3 * 300 * 300 * 4, "bert": 14 * 8}
    models = []
    for name, slo in zip(MODEL_NAMES, paper.TARGETS_MS.values(), strict=True):
        if name not in rows:
            raise ConfigError(f"{latency}: no latencies of {name}; the table must have the paper's nine models")
        bench = "lenet" if name == "lenet1" else name
        models.append(
            Model(
                name=name,
                slo=slo,
                latency=rows[name],
                overhead=overheads.get(name, images),
                l2=l2[bench],
                dram=dram[bench],
                memory=memory[name],
                input_bytes=inputs.get(name, 3 * 224 * 224 * 4),
            )
        )
    constants = [float(value) for value in _rows(resource / "2080ti/INT_MODEL_CONSTANT.CSV")[1]]
    return Tables(models, interference=constants)


def _overhead(path: Path, factor: float) -> dict[int, float]:
    return {int(row[0]): f32(f32(factor) * f32(float(row[1]))) for row in _rows(path)}


def _rows(path: Path) -> list[list[str]]:
    return [row for row in csv.reader(_text(path).splitlines()) if row]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; it belongs to the data of the gpulet paper, see docs/reproduction.md"
        ) from error
