"""Read what gpulet's authors published for an RTX 2080 Ti (casys-kaist/glet): memory, utilisation, coefficients.

Their latency table was never published. `synthetic` reads a made-up table with the paper's shape and SLOs; it is no
measurement, and figures based on it must say so. UTIL.CSV holds seconds in a column labelled ms, of runs slowed by a
profiler: durations are not read.
"""

from __future__ import annotations

import csv
from collections import defaultdict

import msgspec

from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.predictors.linear import DRAM, L2, Coefficients
from cotenant.published import lines, numbers

KIND = "2080ti"
SOURCE = "casys-kaist+glet/resource"
MEGABYTE = 10**6


class Utilisation(msgspec.Struct, frozen=True):
    """Hold fractions of the peak L2 and DRAM throughput of the whole device, for a model in isolation."""

    l2: float
    dram: float


class _Memory(msgspec.Struct):
    name: str
    mem: int


class _Memories(msgspec.Struct):
    models: list[_Memory]


def memory() -> dict[str, int]:
    """Return the bytes of each model, without the context of its process."""
    path = f"{SOURCE}/mem-config.json"
    text = "\n".join(line for _, line in lines(path))
    try:
        return {each.name: each.mem * MEGABYTE for each in msgspec.json.decode(text, type=_Memories).models}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: unexpected content: {error}") from None


def utilisation() -> dict[str, dict[int, Utilisation]]:
    """Return utilisation by model and batch, on the whole device."""
    by_model: dict[str, dict[int, Utilisation]] = defaultdict(dict)
    places, texts = zip(*lines(f"{SOURCE}/{KIND}/UTIL.CSV"), strict=True)
    for place, row in zip(places[1:], csv.DictReader(texts), strict=True):
        batch, l2, dram = numbers(place, row["batch"], row["l2_util(%)"], row["mem_util(%)"])
        by_model[row["bench"]][int(batch)] = Utilisation(l2 / 100, dram / 100)
    return dict(by_model)


def coefficients() -> Coefficients:
    """Return the coefficients of section 4.4's formula on their device."""
    (_, _), (place, line) = lines(f"{SOURCE}/{KIND}/INT_MODEL_CONSTANT.CSV")
    l2_own, l2_other, dram_own, dram_other, constant = numbers(place, *line.split(","))
    return Coefficients(l2_own, l2_other, dram_own, dram_other, constant)


def synthetic_file(tenths: int) -> str:
    return f"golden_glet/inputs_SYNTHETIC/t2_{tenths:02}_latency.csv"


def synthetic(tenths: int) -> dict[tuple[str, str], Profile]:
    """Return made-up latencies. At `tenths` = 10, a batch of 32 on the whole device takes half the SLO."""
    own, sizes = utilisation(), memory()
    points = defaultdict(list)
    for place, line in lines(synthetic_file(tenths)):
        model, *rest = line.split(",")
        percent, batch, ms = numbers(place, *rest)
        used = own[model.rstrip("1") if model.startswith("lenet") else model][int(batch)]
        points[model].append(
            Point(
                share=round(percent * 10),
                batch=int(batch),
                latency=ms / 1e3,
                memory=sizes[model],
                # Their program assumes utilisation proportional to the share.
                features={L2: used.l2 * percent, DRAM: used.dram * percent},
            )
        )
    return {(model, KIND): Profile(model, KIND, measured) for model, measured in points.items()}
