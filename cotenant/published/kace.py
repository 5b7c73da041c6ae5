"""Read seven models for training and inference at three batches each, on a V100-32GB under MPS.

Source: nba556677go/KACE-artifact (KACE, 2024). Throughputs are in rows (KACE: samples) per second, with every process
allowed the whole device. Kernel metrics are from Nsight Compute, weighted by kernel time; SM and memory utilisation
from nvidia-smi; memory is in GB. A workload that occurs in several files has the same features in all.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.predictors import Load
from cotenant.predictors.kernels import ColocatedRun
from cotenant.predictors.samples import Sample
from cotenant.published import lines, numbers

KIND = "v100-32gb"
SOURCE = "nba556677go+KACE-artifact"
PAIRS = f"{SOURCE}/output/dataset/MPS100"
ALL = f"{PAIRS}/MPS100_kernel_labels_targetMPS100.csv"
TRIPLES = f"{SOURCE}/scripts/multiinstance/dataset/total_labels_batch2-8_targetMPS100.csv"
FOURS = f"{SOURCE}/scripts/multiinstance/dataset/KACE/0906_total_labels_comb4_batch2-8_targetMPS100.csv"
PREDICTED = f"{SOURCE}/output/run0709_KACE_hotcloud/n_occur_3"
SEEDS = (10, 20, 30, 40, 50)
OCCURRENCES = tuple(range(2, 11))

# Column of their files, without the workload's number → column of a profile.
KACE = {
    "_Threads": "threads",
    "_Compute (SM) Throughput": "sm_throughput_pct",
    "_DRAM Throughput": "dram_throughput_pct",
    "_Memory Throughput": "memory_throughput_pct",
    "_Registers": "registers",
    "_Static Shared Memory": "static_shared_memory",
    "sm%": "sm_util_pct",
    "mem%": "dram_util_pct",
}
# Features of Xu et al. (HotCloud 2019), in KACE's comparison.
XU = {
    "_PCIe read bandwidth": "pcie_read",
    "_PCIe write bandwidth": "pcie_write",
    "_Long_Kernel": "long_kernel",
    "_ave_Kernel_Length": "kernel_length",
    "_long/short_Ratio": "long_by_short",
    "_avg_Thread": "threads_per_kernel",
    "sm%": "sm_util_pct",
    "mem%": "dram_util_pct",
    "CPU%": "cpu_pct",
    "MainMem%": "main_memory_pct",
}
# Names of policies and models in their figures, and of techniques in their runs.
POLICIES = {"KACE": "KACE", "hotcloud": "Xu et al.", "memcap": "MEMCAP"}
LABELS = {
    "ALBERT": "albert-base-v2",
    "BERT": "bert-base-cased",
    "ViT-inf": "vit-base-patch16-224",
    "ViT-train": "vit_h_14",
    "Wav2vec2": "wav2vec2-base-960h",
    "Whisper": "whisper-large-v2",
}
RUNS = {"lr": "KACE", "rf": "RF", "nn": "NN", "automl": "AutoML"}
COLUMNS = {"KACE": KACE, "hotcloud": XU}


def load(workload: str) -> Load:
    """Parse a workload: `bert-base-cased_batch8-train` is the model `bert-base-cased-train` at batch 8."""
    found = re.fullmatch(r"(.+)_batch(\d+)-(train|inf)", workload)
    if found is None:
        raise ConfigError(f"{workload!r} is not a workload; expected <model>_batch<n>-<train or inf>")
    return Load(f"{found[1]}-{found[3]}", KIND, int(found[2]), WHOLE)


def workload(load: Load) -> str:
    """Format a load as their files name it."""
    model, _, use = load.model.rpartition("-")
    return f"{model}_batch{load.batch}-{use}"


def runs(path: str = ALL, folder: Path | None = None) -> list[ColocatedRun]:
    """Return the co-located runs of a file, in its order."""
    parsed = []
    for place, row in _rows(path, folder):
        every = [i for i in range(1, 5) if f"workload{i}" in row]
        parsed.append(
            ColocatedRun(
                tuple(load(row[f"workload{i}"]) for i in every),
                numbers(place, *(row[f"w{i}throughput"] for i in every)),
            )
        )
    return parsed


def split(occurrences: int, seed: int, features: str = "KACE") -> tuple[list[ColocatedRun], list[ColocatedRun]]:
    """Return their training and test sets.

    A pair is for training while one of its models occurred fewer than `occurrences` times.
    """
    folder = f"{PAIRS}/n_occur_{occurrences}/rand{seed}/{features}"
    return runs(f"{folder}/training_set.csv"), runs(f"{folder}/testing_set.csv")


@functools.cache
def profiles(features: str = "KACE", folder: Path | None = None) -> dict[tuple[str, str], Profile]:
    """Return isolated profiles on the whole device, with the features of KACE or of Xu et al."""
    columns = COLUMNS[features]
    alone = {name: (rate, memory) for name, rate, memory in _alone(folder)}
    path = (
        ALL
        if features == "KACE"
        else f"{SOURCE}/profiling/baselines/hotcloud/hotcloud_combined_labels.csv_targetMPS100.csv"
    )
    points: dict[tuple[str, str], dict[int, Point]] = {}
    for place, row in _rows(path, folder):
        for i in (1, 2):
            name = row[f"workload{i}"]
            one, (rate, memory) = load(name), alone[name]
            values = numbers(place, *(row[f"w{i}{column}"] for column in columns))
            points.setdefault((one.model, KIND), {})[one.batch] = Point(
                share=WHOLE,
                batch=one.batch,
                latency=one.batch / rate,
                memory=round(memory * 1e9),
                features=dict(zip(columns.values(), values, strict=True)),
            )
    return {key: Profile(*key, found.values()) for key, found in points.items()}


def samples(of: list[ColocatedRun] | None = None, folder: Path | None = None) -> list[Sample]:
    """Return a sample for each model of each run as the victim."""
    before = {load(name): rate for name, rate, _ in _alone(folder)}
    return [
        Sample(
            victim,
            (*run.loads[:i], *run.loads[i + 1 :]),
            victim.batch / before[victim],
            victim.batch / run.rows_per_s[i],
        )
        for run in (runs(folder=folder) if of is None else of)
        for i, victim in enumerate(run.loads)
    ]


def published(model: str, seed: int) -> dict[str, dict[str, float]]:
    """Return their printed relative throughput for each target, by policy that chooses the co-located model."""
    throughputs = {}
    for place, row in _rows(f"{PREDICTED}/rand{seed}/{model}/predicts/relative_throughput.csv"):
        name = row.pop("HPworkload")
        throughputs[name] = dict(zip(row, numbers(place, *row.values()), strict=True))
    return throughputs


def quality(model: str, seed: int) -> tuple[float, float]:
    """Return their printed mean squared error and R² of standardised sums, averaged over targets."""
    (_, (place, line)) = lines(f"{PREDICTED}/rand{seed}/{model}/predicts/mse_r2.csv")
    mse, r2 = numbers(place, *line.split(","))
    return mse, r2


def printed() -> dict[str, dict[str, float]]:
    """Return the values of their Figure 6.4 by policy and workload, under the labels printed there."""
    (_, header), *body = lines(f"{SOURCE}/reproduce_figures/21workload.csv")
    labels = [_label(cell) for cell in header.split(",")[1:]]
    values = {}
    for place, line in body:
        policy, *cells = line.split(",")
        values[POLICIES[policy]] = dict(zip(labels, numbers(place, *cells), strict=True))
    return values


def _label(text: str) -> str:
    name, batch, use = re.fullmatch(r"(\w+?)_b(\d+)-(train|inf)", text).groups()  # type: ignore[union-attr]
    return f"{LABELS[name if name != 'ViT' else f'ViT-{use}']}_batch{batch}-{use}"


def _alone(folder: Path | None) -> Iterator[tuple[str, float, float]]:
    """Yield workload, isolated rows per second, and memory in GB."""
    seen = set()
    for place, row in _rows(ALL, folder):
        for i in (1, 2):
            name = row[f"workload{i}"]
            if name not in seen:
                seen.add(name)
                rate, memory = numbers(place, row[f"w{i}exclusive_throughput"], row[f"w{i}memcap"])
                yield name, rate, memory


def _rows(path: str, folder: Path | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    places, texts = zip(*lines(path, folder), strict=True)
    return zip(places[1:], csv.DictReader(texts), strict=True)
