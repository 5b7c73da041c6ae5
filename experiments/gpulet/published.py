"""gpulet's published program, re-created: what it decides, where that differs from the paper too.

The gpulet paper (ATC '22) comes with a scheduler whose plans differ from Algorithm 1 in many details. To set its
figures beside ours, this module makes the very plans that program makes, quirks included (docs/reproduction.md). It was
written from notes on what that program does ("1.7" below is a section of theirs) and from plans that the program made
on synthetic tables (`golden_glet` in its tests), never from its source. Nothing in the package may use it, and it uses
no planner of the package.

The program's numbers are 32-bit floats, and rates are integers, so differences of rates are cut off towards zero.
Here a float is a Python float that a 32-bit one can hold: operations are rounded with `f32` where the program stores
a result, which is exact for one addition, multiplication or division. Where the notes leave the order of operations
open, the one that reproduces every digit of the plans was taken.

Units are the program's: ms, requests/s, percent of a GPU, MB.

Every row of golden_glet comes out as it stands there, to the last digit. No row reaches: trimming to the network,
memory that is short, several residues that merge, models without any batch at p_eff. There this follows the notes
alone. Left out are the "Self Tuning" mode (1.10), and that the memory of a merged residue is not counted (1.7, step 5).
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
from experiments.gpulet import paper

LARGEST_BATCH = 32
MOST_TASKS = 3  # in one gpulet, "Max Model"
SLACK = 15  # a rest of the rate up to this is ignored, everywhere (1.1)
ENOUGH = 0.85  # of the rate, for the final test with interference (1.8)
CONTEXT_MB = 1230  # a process, besides its model (1.10)
USABLE_MEMORY = 0.9
NETWORK_GBIT = 3.0  # into one GPU's server, in Gbit/s of 1024³ bits

# The paper's models as the program calls them, in the order of its scenarios, and of ties (1.11).
NAMES = (
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

_FLOAT = struct.Struct("f")


def f32(x: float) -> float:
    """The nearest 32-bit float."""
    value: float = _FLOAT.unpack(_FLOAT.pack(x))[0]
    return value


class Model(msgspec.Struct, frozen=True):
    """latency: ms by (percent of a GPU, batch); overhead: ms by batch, of getting it together, 0 where absent; l2,
    dram: utilisations in percent by batch, at powers of two, needed for interference only; slo: ms; memory: MB;
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
    """sizes: of gpulets, ascending; layouts: ways to cut a GPU, all tried; none: GPUs are cut as models need it."""

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

    The sum leaves out zero arrivals, and the count after the one that reaches 99 % is taken. Up to 4 requests/s none is
    so likely that the rest comes to 99 %: the program would count for ever; what it would drop anyway stays as it is.
    """
    if rate > 550:
        return int(1.1 * rate)
    if math.exp(-rate) >= 0.01:
        return rate
    count, total = 0, 0.0
    while total < 0.99:
        count += 1
        total += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count + 1


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
        for name, slo in zip(NAMES, paper.TARGETS_MS.values(), strict=True):
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
        """p_eff (1.6): the upper end of the step that adds most throughput per size. The last step, to the whole GPU,
        is never considered."""
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
            it = self.models[model]
            parts = {other for other, _ in it.latency}
            for needed in (part, min(parts), max(parts)):
                if not {(needed, 1), (needed, LARGEST_BATCH)} <= it.latency.keys():
                    raise ConfigError(
                        f"{it.name}: no latency of batches 1 and {LARGEST_BATCH} on {needed} % of a GPU, from which "
                        "the published program interpolates; profile them, or leave that share out of profile and mode"
                    )
            least, most, here = (_line(it.latency, share) for share in (min(parts), max(parts), part))
            span = f32(least[-1] - most[-1])
            weight = f32(f32(here[-1] - most[-1]) / span) if span else 0.0
            known = [f32(high + f32(weight * f32(low - high))) for low, high in zip(least, most, strict=True)]
            for batch in range(1, LARGEST_BATCH + 1):
                if (part, batch) in it.latency:
                    known[batch] = f32(it.latency[part, batch])
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
                    f"{it.name}: interference needs five constants, and L2 and DRAM utilisation of batches 1, 2, 4, … "
                    "32; give them or use a mode without interference"
                )
            known = self._utilisations[model] = _fractions(it.l2), _fractions(it.dram)
        return known


def saturate(curve: Sequence[float], slo: int) -> tuple[int, float]:
    """The largest batch that may take half the target, 1 where even that takes longer, and its throughput (1.5)."""
    batch = largest(lambda batch: f32(2 * curve[batch]) <= slo) or 1
    return batch, f32(1000 * batch / curve[batch])


def residue(curve: Sequence[float], slo: int, rate: int) -> tuple[int, int]:
    """The largest batch that may be gathered at that rate and served in time, 0 if none; and the rate (1.5).

    Where the time between two requests is already longer than the target, batches of one are served as if more came:
    the rate itself is raised.
    """
    batch = largest(lambda batch: f32(curve[batch] + f32(1000 * batch / rate)) <= slo)
    if not batch and curve[1] < f32(1000 / rate) and curve[1] < slo:
        return 1, int(1000 / (slo - curve[1]) * 1.1)
    return batch, rate


def _line(latency: Mapping[tuple[int, int], float], part: int) -> list[float]:
    """Latencies on a share by batch, linear between those profiled; 0 for no batch."""
    line = [0.0] * (LARGEST_BATCH + 1)
    profiled = sorted(batch for other, batch in latency if other == part and batch <= LARGEST_BATCH)
    for low, high in pairwise(profiled):
        before, after = f32(latency[part, low]), f32(latency[part, high])
        for batch in range(low, high):
            line[batch] = f32(before + f32(f32(after - before) * f32((batch - low) / (high - low))))
    line[-1] = f32(latency[part, LARGEST_BATCH])
    return line


def _fractions(percent: Mapping[int, float]) -> list[float]:
    """Not rounded at the end: the program goes on with 64-bit floats there."""
    points = {batch: f32(f32(percent[batch]) / 100) for batch in (1, 2, 4, 8, 16, 32)}
    line = [0.0] * (LARGEST_BATCH + 1)
    for low, high in pairwise(points):
        for batch in range(low, high):
            line[batch] = points[low] + f32(f32(points[high] - points[low]) * ((batch - low) / (high - low)))
    line[-1] = points[LARGEST_BATCH]
    return line


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


class _Task(msgspec.Struct, eq=False):
    model: int
    rate: int
    batch: int
    throughput: float


class _Node(msgspec.Struct, eq=False):
    """A gpulet while it is being planned. occupancy: of its duty cycle; 1 means saturated."""

    gpu: int
    size: int
    dedup: int
    tasks: list[_Task]
    duty: float = 0.0
    occupancy: float = 0.0


class _Want(msgspec.Struct):
    """A gpulet that a model should have (1.6)."""

    model: int
    size: int
    rate: int
    batch: int
    duty: float
    occupancy: float


def schedule(tables: Tables, rates: Mapping[str, int], mode: Mode = ELASTIC) -> Schedule:
    """What the published program makes of these rates, in whole requests/s by model."""
    for name in rates:
        if name not in tables.numbers:
            raise ConfigError(f"{name}: not in the tables, which have {', '.join(tables.numbers)}")
    wanted = {tables.numbers[name]: inflate(rate) for name, rate in rates.items() if rate > 0}
    for layout in product(mode.layouts or ((100,),), repeat=mode.gpus):
        # The last GPU's layout changes slowest.
        program = _Program(tables, mode, layout[::-1])
        if program.serve(wanted):
            return Schedule(schedulable=True, gpulets=tuple(program.gpulets()))
    return Schedule(schedulable=False)


class _Program:
    def __init__(self, tables: Tables, mode: Mode, layout: Sequence[tuple[int, ...]]) -> None:
        self.tables = tables
        self.mode = mode
        self.splits = not mode.layouts and mode.sizes != (100,)
        self.gpus = [
            [_Node(gpu, size, int(parts[:at].count(size) > 0), []) for at, size in enumerate(parts)]
            for gpu, parts in enumerate(layout)
        ]

    def serve(self, rates: Mapping[int, int]) -> bool:
        """1.7 and the end of 1.8: models by rate · target, ties by the larger number first."""
        order = sorted(rates, key=lambda model: (rates[model] * self.tables.models[model].slo, -model))
        for model in order:
            left, _ = self._place(model, rates[model])
            if left > SLACK and self._share_in_time(model, left) > SLACK:
                return False
        if not self.mode.interference:
            return True
        # Those that neighbours have slowed too much are found first and planned anew once. What this does to others is
        # not looked at again. Time is shared here only where no gpulet at all was found.
        for model in [model for model in order if self._falls_short(model, rates[model])]:
            self._remove(model)
            left, placed = self._place(model, rates[model])
            if not placed:
                self._share_in_time(model, left)
            if self._falls_short(model, rates[model]):
                return False
        return True

    def gpulets(self) -> Iterator[Gpulet]:
        for node in self._nodes():
            for task in node.tasks:
                name = self.tables.models[task.model].name
                yield Gpulet(node.gpu, node.size, node.dedup, name, task.batch, node.duty, task.throughput)

    def _place(self, model: int, rate: int) -> tuple[int, bool]:
        """1.7, steps 1 to 5: what is left of the rate, and whether any was placed."""
        wants = self._estimate(model, rate)
        if wants is not None and self._would_fit(wants):
            lost = self._allocate(wants)
            if lost is not None:
                return lost, True
        # What was allocated before the failure stays.
        left = self._readjust(model, int(rate - self._throughput(model)), wants[0].size if wants else 100)
        self._merge_residues(model)
        return left, left < rate

    def _estimate(self, model: int, rate: int) -> list[_Want] | None:
        """1.6: saturated gpulets of size p_eff and one for the rest; None where the rest cannot be served so."""
        size = self.tables.efficient(model, self.mode.sizes)
        batch, most = self.tables.saturated(model, size)
        wants = []
        while most < rate:
            wants.append(_Want(model, size, int(most), batch, self.tables.alone(model, size)[batch], 1.0))
            rate = int(f32(rate - most))
        if rate > SLACK:
            slo = self.tables.models[model].slo
            batch, rate = residue(self.tables.alone(model, size), slo, rate)
            if not batch:
                return None
            # p_req with the batch of p_eff: the size shrinks, step by step, while that batch still does.
            gather = f32(batch * f32(1000 / rate))
            for smaller in reversed([other for other in self.mode.sizes if other < size]):
                latency = self.tables.alone(model, smaller)[batch]
                if gather < latency or f32(latency + gather) > slo:
                    break
                size = smaller
            latency = self.tables.alone(model, size)[batch]
            duty = max(gather, latency)
            wants.append(_Want(model, size, rate, batch, duty, f32(latency / duty)))
        return sorted(wants, key=lambda want: -want.size)

    def _would_fit(self, wants: Iterable[_Want]) -> bool:
        """1.7, step 2: a dry run, in which only what is left of whole GPUs is kept track of."""
        left: dict[int, int] = {}
        for want in wants:
            node = self._find(want, left)
            if node is None:
                return False
            whole = node.size == 100 and self.splits
            left[id(node)] = left.get(id(node), 100) - want.size if whole else 0
        return True

    def _find(self, want: _Want, left: Mapping[int, int]) -> _Node | None:
        """1.7, best fit: a whole GPU is as good as a gpulet of just that size, and the last of the best wins."""
        best, least = None, 100
        for node in self._nodes():
            if node.tasks or left.get(id(node), node.size) < want.size or not self._has_memory(node, want.model):
                continue
            latency = self._curve(want.model, want.size, self._neighbour(node))[want.batch]
            if f32(latency + want.duty) > self.tables.models[want.model].slo or not self._spares_neighbour(node):
                continue
            excess = 0 if node.size == 100 else node.size - want.size
            if excess <= least:
                best, least = node, excess
        return best

    def _spares_neighbour(self, node: _Node) -> bool:
        """1.7, neighbour test: the newcomer does not enter into it, whether interference is considered or not."""
        other = self._neighbour(node)
        return other is None or all(
            f32(f32(self._overhead(task)) + f32(2 * other.duty)) <= self.tables.models[task.model].slo
            for task in other.tasks
        )

    def _allocate(self, wants: Sequence[_Want]) -> int | None:
        """1.7, step 3: the rate that neighbours cost; None where a wanted gpulet is not found, others stay."""
        lost = 0
        for at, want in enumerate(wants):
            node = self._find(want, {})
            if node is None:
                return None
            if node.size == 100 and want.size < 100 and self.splits:
                self._split(node, want.size)
            if node.size == want.size:
                self._put(node, want.model, want.rate, want.batch, want.duty, want.occupancy)
            else:
                # A larger gpulet is taken as it is, and its batch worked out beside a neighbour that is looked up on
                # the GPU whose number is the position in the list, not on the GPU that it is on.
                others = self.gpus[at] if at < len(self.gpus) else []
                other = next((other for other in reversed(others) if other is not node), None)
                self._fill(node, want.model, want.rate, other, saturated=want.occupancy == 1)
            if self.mode.interference:
                lost += sum(self._adjust(each) or 0 for each in self.gpus[node.gpu])
        return lost

    def _fill(self, node: _Node, model: int, rate: int, other: _Node | None, *, saturated: bool) -> bool:
        """Put the model there, beside the neighbour `other`; False where no batch is served in time."""
        slo = self.tables.models[model].slo
        curve = self._curve(model, node.size, other)
        if saturated:
            batch, most = saturate(curve, slo)
            rate, duty = int(most), curve[batch]
        else:
            batch, rate = residue(curve, slo, rate)
            if not batch:
                return False
            duty = max(f32(1000 * batch / rate), curve[batch])
        self._put(node, model, rate, batch, duty, f32(curve[batch] / duty))
        return True

    def _put(self, node: _Node, model: int, rate: int, batch: int, duty: float, occupancy: float) -> None:
        node.tasks = [_Task(model, rate, batch, f32(1000 * batch / duty))]
        node.duty, node.occupancy = duty, occupancy

    def _adjust(self, node: _Node) -> int | None:
        """1.8: smaller batches where the neighbour slows them; the rate that is lost, None if none is small enough."""
        if not node.tasks:
            return 0
        other = self._neighbour(node)
        before = node.tasks[0].throughput
        if len(node.tasks) == 1 and node.occupancy == 1:
            (task,) = node.tasks
            slo = self.tables.models[task.model].slo
            curve = self._curve(task.model, node.size, other)
            # As long as the batch still holds, only its throughput is renewed, not its duty cycle.
            if f32(2 * curve[task.batch]) >= slo:
                while task.batch and f32(2 * curve[task.batch]) > slo:
                    task.batch -= 1
                if not task.batch:
                    return None
                node.duty = curve[task.batch]
            task.throughput = f32(1000 * task.batch / curve[task.batch]) if task.batch else 0.0  # given up before
            return max(0, int(before - task.throughput))
        busy = self._busy(node, [(task.model, task.batch) for task in node.tasks])
        if all(f32(busy + node.duty) <= 1.05 * self.tables.models[task.model].slo for task in node.tasks):
            return 0
        duties = []
        for task in node.tasks:
            slo = self.tables.models[task.model].slo
            curve = self._curve(task.model, node.size, other)
            first, duty = task.batch, node.duty
            while task.batch:
                task.batch -= 1
                # Compounding: the duty cycle falls faster than the batch.
                duty = f32(duty * f32(task.batch / first))
                if f32(curve[task.batch] + duty) <= 1.05 * slo:
                    break
            if not task.batch:
                return None
            duties.append(duty)
        node.duty = min(duties)
        for task in node.tasks:
            task.throughput = f32(1000 * task.batch / node.duty)
        return max(0, int(before - node.tasks[0].throughput))

    def _readjust(self, model: int, rate: int, first: int) -> int:
        """1.7, step 4: any empty gpulets, largest first; whole GPUs are split at the size `first`. What is left."""
        slo = self.tables.models[model].slo
        for node in sorted((node for node in self._nodes() if not node.tasks), key=lambda node: -node.size):
            if rate <= SLACK:
                break
            if not self._has_memory(node, model):
                continue
            size = min(node.size, first) if self.splits and node.size == 100 else node.size
            curve = self._curve(model, size, self._neighbour(node))
            batch, most = saturate(curve, slo)
            saturated = most <= rate
            if saturated and f32(2 * curve[batch]) > slo:
                continue
            if size < node.size:
                self._split(node, size)
            if self._fill(node, model, rate, self._neighbour(node), saturated=saturated) and self._holds(node):
                rate = max(0, int(f32(rate - node.tasks[0].throughput)))
            else:
                node.tasks = []
                self._mend()
        return rate

    def _holds(self, node: _Node) -> bool:
        """Network and interference, which may cost the newcomer a part of its batch, or its place."""
        (task,) = node.tasks
        while task.batch and self._network(node.gpu) > NETWORK_GBIT:
            task.batch -= 1
            task.throughput = f32(1000 * task.batch / node.duty)
        if not task.batch:
            return False
        if not self.mode.interference:
            return True
        # What the neighbour loses here is made up for by nobody.
        other = self._neighbour(node)
        return self._adjust(node) is not None and (other is None or self._adjust(other) is not None)

    def _merge_residues(self, model: int) -> None:
        """1.7, step 5: one gpulet for all residues of the model, also where there is just one, whose rate then loses
        what the float falls short of an integer."""
        mine = [node for node in self._nodes() if [task.model for task in node.tasks] == [model] and node.occupancy < 1]
        if not mine:
            return
        total = int(f32(sum(node.tasks[0].throughput for node in mine)))
        target = min(mine, key=lambda node: self.tables.saturated(model, node.size)[1])
        if self.tables.saturated(model, target.size)[1] < total:
            return
        if self._fill(target, model, total, self._neighbour(target), saturated=False):
            for node in mine:
                if node is not target:
                    node.tasks = []
            self._mend()

    def _remove(self, model: int) -> None:
        for node in self._nodes():
            others = [task for task in node.tasks if task.model != model]
            if len(others) < len(node.tasks):
                node.tasks = others
                node.occupancy = f32(self._busy(node, [(task.model, task.batch) for task in others]) / node.duty)
        self._mend()

    def _falls_short(self, model: int, rate: int) -> bool:
        return rate > SLACK and self._throughput(model) < ENOUGH * rate

    def _share_in_time(self, model: int, rate: int) -> int:
        """1.9: the rest of the rate into gpulets in use, fullest first; what is left."""
        while rate > SLACK:
            candidates = sorted(
                (
                    node
                    for node in self._nodes()
                    if 0 < len(node.tasks) < MOST_TASKS and node.occupancy < 1 and self._has_memory(node, model)
                ),
                key=lambda node: -node.occupancy,
            )
            for node in candidates:
                if all(task.model != model for task in node.tasks) and self._join(node, model, rate):
                    rate = int(f32(rate - node.tasks[-1].throughput))
                    break
            else:
                break
        return rate

    def _join(self, node: _Node, model: int, rate: int) -> bool:
        slo = self.tables.models[model].slo
        curve = self._curve(model, node.size, self._neighbour(node))
        # The first batch that passes alone is the only one that is tried with the others.
        for batch in range(min(LARGEST_BATCH, int(node.duty * rate / 1000)), 0, -1):
            duty = int(1000 * batch / rate)
            if duty and f32(duty + curve[batch]) < slo and f32(curve[batch] / duty) < f32(1 - node.occupancy):
                break
        else:
            return False
        if duty > node.duty:
            return False
        tasks = [(task.model, task.rate, max(1, int(duty * task.rate / 1000))) for task in node.tasks]
        tasks.append((model, rate, batch))
        busy = self._busy(node, [(task, batch) for task, _, batch in tasks])
        if busy > duty or any(f32(busy + duty) > self.tables.models[task].slo for task, _, _ in tasks):
            return False
        # The others may now get less than they need; only the last test (ENOUGH) looks at that.
        node.tasks = [_Task(task, rate, batch, f32(1000 * batch / duty)) for task, rate, batch in tasks]
        node.duty, node.occupancy = float(duty), f32(busy / duty)
        return True

    def _nodes(self) -> Iterator[_Node]:
        for nodes in self.gpus:
            yield from nodes

    def _neighbour(self, node: _Node) -> _Node | None:
        return next((other for other in self.gpus[node.gpu] if other is not node), None)

    def _split(self, node: _Node, size: int) -> None:
        node.size = size
        self.gpus[node.gpu].append(_Node(node.gpu, 100 - size, int(size == 50), []))

    def _mend(self) -> None:
        """GPUs without tasks are whole again."""
        if self.splits:
            for gpu, nodes in enumerate(self.gpus):
                if not any(node.tasks for node in nodes):
                    self.gpus[gpu] = [_Node(gpu, 100, 0, [])]

    def _curve(self, model: int, part: int, other: _Node | None) -> list[float]:
        """Latencies by batch beside a neighbour: the worst of its tasks (1.4)."""
        if not self.mode.interference or other is None or not other.tasks:
            return self.tables.alone(model, part)
        curves = [self.tables.beside(model, part, task.model, task.batch, other.size) for task in other.tasks]
        return curves[0] if len(curves) == 1 else list(map(max, *curves))

    def _busy(self, node: _Node, batches: Iterable[tuple[int, int]]) -> float:
        """ms of one round with these models and batches."""
        other = self._neighbour(node)
        total = 0.0
        for model, batch in batches:
            total = f32(total + self._curve(model, node.size, other)[batch])
        return total

    def _overhead(self, task: _Task) -> float:
        return self.tables.models[task.model].overhead.get(task.batch, 0.0)

    def _has_memory(self, node: _Node, model: int) -> bool:
        """1.10."""
        used = sum(
            CONTEXT_MB + sum(self.tables.models[task.model].memory for task in other.tasks)
            for other in self.gpus[node.gpu]
            if other.tasks
        )
        needed = self.tables.models[model].memory + (0 if node.tasks else CONTEXT_MB)
        return self.tables.memory * USABLE_MEMORY - used > needed

    def _network(self, gpu: int) -> float:
        """Gbit/s (1.10)."""
        requests = (task for node in self.gpus[gpu] for task in node.tasks)
        return sum(task.throughput * self.tables.models[task.model].input_bytes for task in requests) * 8 / 1024**3

    def _throughput(self, model: int) -> float:
        return f32(sum(task.throughput for node in self._nodes() for task in node.tasks if task.model == model))
