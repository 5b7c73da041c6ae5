"""gpulet's published program, re-created: what it decides, where that differs from the paper too.

The gpulet paper (ATC '22) comes with a scheduler whose plans differ from Algorithm 1 in many details. To set its
figures beside ours, this module makes the very plans that program makes, quirks included. It was written from the
notes on that program (`../shared/data/ALGORITHMS.md`, section 1; "1.7" below is a section there) and from plans that the
program made on synthetic tables (`golden_glet` in `../shared/data/INDEX.md`), never from its source. Nothing in the
package may use it, and it uses no planner of the package.

The program's numbers are 32-bit floats, and rates are integers, so differences of rates are cut off towards zero.
Here a float is a Python float that a 32-bit one can hold: operations are rounded with `f32` where the program stores
a result, which is exact for one addition, multiplication or division. Where the notes leave the order of operations
open, the one that reproduces every digit of the plans was taken.

Units are the program's: ms, requests/s, percent of a GPU, MB.

Left out, since no plan shows them: the "Self Tuning" mode (1.10), and that a merged residue's memory is not counted
(1.7, step 5).
"""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import msgspec

from cotenant.errors import ConfigError

LARGEST_BATCH = 32
MOST_TASKS = 3  # in one gpulet, "Max Model"
SLACK = 15  # a rest of the rate up to this is ignored, everywhere (1.1)
ENOUGH = 0.85  # of the rate, for the final test with interference (1.8)
CONTEXT_MB = 1230  # a process, besides its model (1.10)
USABLE_MEMORY = 0.9
NETWORK_GBIT = 3.0  # into one GPU's server, in Gbit/s of 1024³ bits

_FLOAT = struct.Struct("f")


def f32(x: float) -> float:
    """The nearest 32-bit float."""
    value: float = _FLOAT.unpack(_FLOAT.pack(x))[0]
    return value


class Model(msgspec.Struct, frozen=True):
    """latency: ms by (percent of a GPU, batch); overhead: ms by batch, of getting it together, 0 where absent; l2, dram:
    utilisations in percent by batch, at powers of two, needed for interference only; slo: ms; memory: MB;
    input_bytes: of one request."""

    name: str
    slo: int
    latency: Mapping[tuple[int, int], float]
    overhead: Mapping[int, float] = {}
    l2: Mapping[int, float] = {}
    dram: Mapping[int, float] = {}
    memory: int = 0
    input_bytes: int = 0


class Mode(msgspec.Struct, frozen=True):
    """sizes: of gpulets, ascending; layouts: ways to cut a GPU to try in turn, or none: GPUs are cut as models need it."""

    sizes: tuple[int, ...] = (20, 40, 50, 60, 80, 100)
    interference: bool = True
    layouts: tuple[tuple[int, ...], ...] = ()
    gpus: int = 4


ELASTIC = Mode()
ELASTIC_ALONE = Mode(interference=False)
SBP = Mode(sizes=(100,), interference=False)  # time sharing only
# Exhaustive over layouts; within each the same greedy loop, so "ideal" is so for cuts only (1.11).
IDEAL = Mode(layouts=((50, 50), (60, 40), (80, 20), (100,)))
HALVES = Mode(sizes=(50,), interference=False, layouts=((50, 50),))  # Figure 5's 1:1


class Gpulet(msgspec.Struct, frozen=True):
    """One model on one gpulet. dedup: tells two halves of a GPU apart; duty: ms; throughput: requests/s."""

    gpu: int
    size: int
    dedup: int
    model: str
    batch: int
    duty: float
    throughput: float


class Schedule(msgspec.Struct, frozen=True):
    schedulable: bool
    gpulets: tuple[Gpulet, ...] = ()

    def text(self) -> str:
        """As in golden_glet: gpu:size:dedup:model:batch:duty, joined by semicolons."""
        return ";".join(f"{g.gpu}:{g.size}:{g.dedup}:{g.model}:{g.batch}:{g.duty:.6f}" for g in self.gpulets)


@cache
def inflate(rate: int) -> int:
    """The rate that is planned for: about the 99th percentile of a Poisson count (1.2, not in the paper).

    The sum leaves out zero arrivals, and the count after the one that reaches 99 % is taken.
    """
    if rate > 550:
        return int(1.1 * rate)
    count, total = 0, 0.0
    while rate > 0 and total < 0.99:
        count += 1
        total += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count + 1 if rate > 0 else 0


def largest(feasible: Callable[[int], bool]) -> int:
    """The program's search for the largest batch, 0 if none (1.5): it stops when both ends differ by one, so that the
    largest is 31, never 32."""
    low, high = 1, LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        if feasible(middle):
            low = middle
        else:
            high = middle
    return low if low > 1 or feasible(1) else 0


class Tables:
    """What the program knows of models and GPU: latencies and the like. Models are numbered as listed."""

    def __init__(
        self, models: Sequence[Model], *, interference: Sequence[float] = (), memory: int = 11_000, ratio: float = 1.1
    ) -> None:
        """interference: five constants, of L2 (own, other), DRAM (own, other) and 1; memory: MB of a GPU; ratio: by
        which every latency is multiplied."""
        self.models = tuple(models)
        self.numbers = {model.name: number for number, model in enumerate(models)}
        self.memory = memory
        self._constants = tuple(interference)
        self._ratio = f32(ratio)
        self._raw: dict[tuple[int, int], list[float]] = {}
        self._alone: dict[tuple[int, int], list[float]] = {}
        self._beside: dict[tuple[int, int, int, int, int], list[float]] = {}
        self._saturated: dict[tuple[int, int], tuple[int, float]] = {}
        self._utilisations: dict[int, tuple[list[float], list[float]]] = {}
        for model in models:
            parts = {part for part, _ in model.latency}
            for part in (min(parts, default=100), max(parts, default=100)):
                if not {1, LARGEST_BATCH} <= {batch for other, batch in model.latency if other == part}:
                    raise ConfigError(
                        f"{model.name}: the published program needs latencies of batches 1 and 32 on its smallest and its "
                        f"largest share, and {part} % lacks them; add them to the profile or leave that share out"
                    )

    @classmethod
    def read(cls, latency: Path, resource: Path) -> Tables:
        """The paper's nine models on the RTX 2080 Ti, from a latency table (model, part, batch, ms) and the folder
        `resource` of the published program: everything but latencies is measured."""
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
        for name, slo in SLOS.items():
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
        return cls(models, interference=constants)

    def alone(self, model: int, part: int) -> list[float]:
        """Latencies without neighbours by batch from 0, which has none (1.3)."""
        known = self._alone.get((model, part))
        if known is None:
            overhead = self.models[model].overhead
            known = [
                f32(f32(ms + f32(overhead.get(batch, 0.0))) * self._ratio) if batch else 0.0
                for batch, ms in enumerate(self._profiled(model, part))
            ]
            self._alone[model, part] = known
        return known

    def beside(self, model: int, part: int, other: int, batch: int, other_part: int) -> list[float]:
        """The same beside a neighbour with batches of `batch` (1.3, 1.4): overhead suffers no interference."""
        key = model, part, other, batch, other_part
        known = self._beside.get(key)
        if known is None:
            overhead = self.models[model].overhead
            known = [0.0]
            for own, ms in enumerate(self._profiled(model, part)[1:], 1):
                slowdown = self._slowdown(model, own, part, other, batch, other_part)
                base = f32(ms + f32(overhead.get(own, 0.0)))
                known.append(f32(f32(base + f32(ms * f32(slowdown - 1))) * self._ratio))
            self._beside[key] = known
        return known

    def saturated(self, model: int, part: int) -> tuple[int, float]:
        """The batch that fills a gpulet without neighbours, and its throughput (1.6)."""
        known = self._saturated.get((model, part))
        if known is None:
            known = self._saturated[model, part] = saturate(self.alone(model, part), self.models[model].slo)
        return known

    def efficient(self, model: int, sizes: Sequence[int]) -> int:
        """p_eff (1.6): the upper end of the step that adds most throughput per size. The last step, to the whole GPU, is
        never considered."""
        best, steepest = sizes[0], 0.0
        for low, high in pairwise(size for size in sizes if size < 100):
            before, after = self.saturated(model, low)[1], self.saturated(model, high)[1]
            slope = f32(f32(after - before) / (high - low))
            if f32(after / before) >= f32(1.05) and slope > steepest:
                best, steepest = high, slope
        return best

    def _profiled(self, model: int, part: int) -> list[float]:
        """The profile by batch. What was not profiled, even where other batches were on that share, is blended of the
        smallest and the largest share with the weight that fits batch 32, so that it need not lie between its
        neighbours (1.3)."""
        known = self._raw.get((model, part))
        if known is None:
            latency = self.models[model].latency
            parts = sorted({other for other, _ in latency})
            least, most = _line(latency, parts[0]), _line(latency, parts[-1])
            span = f32(least[-1] - most[-1])
            here = _line(latency, part) if (part, LARGEST_BATCH) in latency else _between(latency, part)
            weight = f32(f32(here[-1] - most[-1]) / span) if span else 0.0
            known = [0.0]
            for batch in range(1, LARGEST_BATCH + 1):
                exact = latency.get((part, batch))
                blend = f32(most[batch] + f32(weight * f32(least[batch] - most[batch])))
                known.append(blend if exact is None else f32(exact))
            self._raw[model, part] = known
        return known

    def _slowdown(self, model: int, batch: int, part: int, other: int, other_batch: int, other_part: int) -> float:
        """1.4. Utilisations are taken to be proportional to the share. The constants are 64-bit floats."""
        own_l2, own_dram = self._utilisation(model)
        other_l2, other_dram = self._utilisation(other)
        c = self._constants
        total = f32(c[0] * (own_l2[batch] * (part / 100)))
        total += f32(c[1] * (other_l2[other_batch] * (other_part / 100)))
        total += f32(c[2] * (own_dram[batch] * (part / 100)))
        total += f32(c[3] * (other_dram[other_batch] * (other_part / 100)))
        return max(1.0, f32(total + c[4]))

    def _utilisation(self, model: int) -> tuple[list[float], list[float]]:
        """L2 and DRAM as fractions by batch, linear between powers of two."""
        known = self._utilisations.get(model)
        if known is None:
            it = self.models[model]
            if not self._constants or not {1, 2, 4, 8, 16, 32} <= it.l2.keys() & it.dram.keys():
                raise ConfigError(
                    f"{it.name}: interference needs five constants, and L2 and DRAM utilisation of batches 1, 2, 4, … 32; "
                    "give them or use a mode without interference"
                )
            known = self._utilisations[model] = _fractions(it.l2), _fractions(it.dram)
        return known
