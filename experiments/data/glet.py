"""What gpulet's authors published of their models on an RTX 2080 Ti (casys-kaist/glet): memory, utilisation, constants.

Their table of latencies was never published. `synthetic` reads one that was made up to have their shape and their
targets, for tests: it is no measurement, and figures made from it are to say so.
UTIL.CSV holds seconds in a column that says ms, of runs that a profiler slowed down: durations are not read.
"""

from __future__ import annotations

import csv
from collections import defaultdict

import msgspec

from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.predictors.linear import DRAM, L2, Coefficients
from experiments.data import lines, numbers

KIND = "2080ti"
SOURCE = "casys-kaist+glet/resource"
MEGABYTE = 10**6


class Utilisation(msgspec.Struct, frozen=True):
    """Fractions of what the whole device can move, while a model has it to itself."""

    l2: float
    dram: float


class _Memory(msgspec.Struct):
    name: str
    mem: int


class _Memories(msgspec.Struct):
    models: list[_Memory]


def memory() -> dict[str, int]:
    """Bytes of each model, without the context of its process."""
    path = f"{SOURCE}/mem-config.json"
    text = "\n".join(line for _, line in lines(path))
    try:
        return {each.name: each.mem * MEGABYTE for each in msgspec.json.decode(text, type=_Memories).models}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is not what was expected here: {error}") from None


def utilisation() -> dict[str, dict[int, Utilisation]]:
    """By model and batch, on the whole device."""
    found: dict[str, dict[int, Utilisation]] = defaultdict(dict)
    places, texts = zip(*lines(f"{SOURCE}/{KIND}/UTIL.CSV"), strict=True)
    for place, row in zip(places[1:], csv.DictReader(texts), strict=True):
        batch, l2, dram = numbers(place, row["batch"], row["l2_util(%)"], row["mem_util(%)"])
        found[row["bench"]][int(batch)] = Utilisation(l2 / 100, dram / 100)
    return dict(found)


def coefficients() -> Coefficients:
    """Of section 4.4's formula, on their device."""
    (_, _), (place, line) = lines(f"{SOURCE}/{KIND}/INT_MODEL_CONSTANT.CSV")
    l2_own, l2_other, dram_own, dram_other, constant = numbers(place, *line.split(","))
    return Coefficients(l2_own, l2_other, dram_own, dram_other, constant)


def synthetic_file(tenths: int) -> str:
    return f"golden_glet/inputs_SYNTHETIC/t2_{tenths:02}_latency.csv"


def synthetic(tenths: int) -> dict[tuple[str, str], Profile]:
    """Made-up latencies, `tenths` / 10 of what would make a batch of 32 on the whole device take half the target."""
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
                # Their program takes utilisation to go with the share.
                features={L2: used.l2 * percent, DRAM: used.dram * percent},
            )
        )
    return {(model, KIND): Profile(model, KIND, measured) for model, measured in points.items()}
