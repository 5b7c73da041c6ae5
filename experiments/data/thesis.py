"""Read eighteen workloads on an A30 under MIG and a V100 under MPS: NTUA thesis (2023), repositories of `dimgatz98`.

The files are named `.ods` but are tab-separated text. Entries are queries per second. Where two models could not run
together, the loss tables hold 100 (V100) or 400 (A30), which are not measurements: they are omitted, and listed by
`cannot`.

What losses are relative to is not said, and is read off here. On the A30 it is what a workload reaches alone on a
quarter, in the first version of the table of configurations: where nothing was left of a workload, its loss is that
number to the last digit (138.04, 307.98, 311.2, 26 and 26.05). On the V100 it is the throughput of another scenario, 5
to 40 times less than in the table of configurations. An earlier version of the losses (`V100_ALONE`) has it on the
diagonal and where two workloads could not run together; `V100_LOSSES` has the measurements; in the last version some of
those are replaced, such as 12.661 by 247.05.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cotenant.published import lines, numbers

COMPARISON = "dimgatz98+svd_sklearn.impute.IterativeImputer_comparison"
RECOMMENDER = "dimgatz98+k8s-gpu-scheduler/pkg/recommender/recommender"
SENTINELS = {"V100": 100.0, "A30": 400.0}
V100_ALONE = "dimgatz98+k8s-gpu-scheduler/history/4d99e2d/interference_train.ods"
V100_LOSSES = "dimgatz98+k8s-gpu-scheduler/history/2f3a3fa/interference_train.ods"
FIRST_CONFIGURATIONS = "dimgatz98+k8s-gpu-scheduler/history/c80acfe/configurations_train.ods"
QUARTER_A30 = "4P_A30"

Table = tuple[list[str], list[str], NDArray[np.float64]]


def alone() -> Table:
    """Return the data of Figure 7.1: 18 users, 6 items, and their ratings."""
    return _table(f"{COMPARISON}/dataset.ods")


def configurations() -> Table:
    """Return workloads, partitions, and queries per second."""
    return _table(f"{RECOMMENDER}/configurations_train.ods")


def first_configurations() -> Table:
    """Return the first version of `configurations`, before parts were replaced by series such as 70.5, 71.5, 72.5."""
    return _table(FIRST_CONFIGURATIONS)


def losses() -> Table:
    """Return workloads on a GPU, co-located models, and queries per second lost; NaN if not run."""
    rows, columns, values = _table(f"{RECOMMENDER}/interference_train.ods")
    return rows, columns, np.where(_sentinel(rows, values), np.nan, values)


def cannot() -> list[tuple[str, str]]:
    """List workloads on a GPU, each with a co-located model with which it does not fit."""
    rows, columns, values = _table(f"{RECOMMENDER}/interference_train.ods")
    return [(rows[i], columns[j]) for i, j in np.argwhere(_sentinel(rows, values))]


def alone_and_lost(gpu: str) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Return workloads, their queries per second alone, and what each (row) loses beside each (column); NaN if not run.

    gpu: "V100" (of the Offline scenario), or "A30" (on a quarter of it).
    """
    if gpu == "V100":
        names, _, before = _table(V100_ALONE)
        return names, before.diagonal().copy(), _table(V100_LOSSES)[2]
    names, columns, rates = first_configurations()
    rows, _, lost = losses()
    return names, rates[:, columns.index(QUARTER_A30)], lost[[rows.index(f"{name}_{gpu}") for name in names]]


def published() -> dict[int, dict[str, list[float]]]:
    """Return the data of Figure 7.1: mean squared errors of each user by number of hidden items and method."""
    errors: dict[int, dict[str, list[float]]] = {}
    for place, line in list(lines(f"{COMPARISON}/results/leave_one_out/results.ods"))[1:]:
        user, *cells = line.split("\t")
        if user.startswith("user"):
            hidden, svd, _, imputer, _ = numbers(place, *cells)
            of = errors.setdefault(int(hidden), {"svd": [], "imputer": []})
            of["svd"].append(svd)
            of["imputer"].append(imputer)
    return errors


def _sentinel(rows: list[str], values: NDArray[np.float64]) -> NDArray[np.bool_]:
    marks = np.array([SENTINELS[row.rpartition("_")[2]] for row in rows])
    found: NDArray[np.bool_] = values == marks[:, None]
    return found


def _table(path: str) -> Table:
    (_, header), *body = lines(path)
    rows, values = [], []
    for place, line in body:
        name, *cells = line.split("\t")
        rows.append(name)
        values.append(numbers(place, *(cell or "nan" for cell in cells)))
    return rows, header.split("\t")[1:], np.array(values)
