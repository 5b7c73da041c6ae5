"""gpulet's published program, re-created with its quirks."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import msgspec

_FLOAT = struct.Struct("f")


def f32(x: float) -> float:
    return _FLOAT.unpack(_FLOAT.pack(x))[0]


SLACK = 15
LARGEST = 32
CONTEXT_MB = 1230


class Model(msgspec.Struct, frozen=True):
    name: str
    slo: int
    latency: dict[tuple[int, int], float]
    overhead: tuple[float, ...]
    l2: dict[int, float]
    dram: dict[int, float]
    memory: int
    input_bytes: int


class Mode(msgspec.Struct, frozen=True):
    sizes: tuple[int, ...] = (20, 40, 50, 60, 80, 100)
    interference: bool = True
    search: bool = False
    gpus: int = 4
    layouts: tuple[tuple[int, ...], ...] = ((50, 50), (60, 40), (80, 20), (100,))


def inflate(rate: int) -> int:
    if rate == 0:
        return 0
    if rate > 550:
        return int(1.1 * rate)
    total = 0.0
    k = 0
    while total < 0.99:
        k += 1
        total += math.exp(k * math.log(rate) - rate - math.lgamma(k + 1))
    return k + 1


class Tables:
    def __init__(self, models: Sequence[Model], constants: Sequence[float], memory: int, ratio: float = 1.1) -> None:
        self.models = tuple(models)
        self.names = [m.name for m in models]
        self.constants = list(constants)
        self.memory = memory
        self.ratio = f32(ratio)
        self._alone: dict[tuple[int, int], list[float]] = {}
        self._raw: dict[tuple[int, int], list[float]] = {}
        self._beside: dict[tuple[int, int, int, int, int, int], float] = {}
        self._sat: dict[tuple[int, int], tuple[int, float]] = {}
        self._l2 = [self._util(m.l2) for m in models]
        self._dram = [self._util(m.dram) for m in models]

    def _util(self, points: Mapping[int, float]) -> list[float]:
        out = [0.0]
        for b in range(1, 33):
            lo = 1 << (b.bit_length() - 1)
            hi = min(lo * 2, 32)
            a, c = f32(f32(points[lo]) / 100), f32(f32(points[hi]) / 100)
            if lo == b:
                out.append(a)
            else:
                out.append(a + f32(f32(c - a) * ((b - lo) / (hi - lo))))
        return out

    def raw(self, m: int, p: int) -> list[float]:
        key = m, p
        if key not in self._raw:
            lat = self.models[m].latency
            parts = sorted({q for q, _ in lat})
            lo, hi = self._line(m, parts[0]), self._line(m, parts[-1])
            exact = self._line(m, p)[32] if p in parts else None
            out = [0.0]
            if p in parts:
                l32 = f32(lat[p, 32])
                w = f32(f32(l32 - hi[32]) / f32(lo[32] - hi[32]))
            for b in range(1, 33):
                if (p, b) in lat:
                    out.append(f32(lat[p, b]))
                else:
                    out.append(f32(hi[b] + f32(w * f32(lo[b] - hi[b]))))
            self._raw[key] = out
        return self._raw[key]

    def _line(self, m: int, p: int) -> list[float]:
        lat = self.models[m].latency
        batches = sorted(b for q, b in lat if q == p)
        out = [0.0] * 33
        for a, c in pairwise(batches):
            la, lc = f32(lat[p, a]), f32(lat[p, c])
            for b in range(a, c + 1):
                out[b] = f32(la + f32(f32(lc - la) * f32((b - a) / (c - a)))) if a < b < c else (la if b == a else lc)
        return out

    def alone(self, m: int, p: int) -> list[float]:
        key = m, p
        if key not in self._alone:
            over = self.models[m].overhead
            self._alone[key] = [0.0] + [
                f32(f32(raw + f32(over[b])) * self.ratio) for b, raw in enumerate(self.raw(m, p)) if b
            ]
        return self._alone[key]

    def beside(self, m: int, b: int, p: int, m2: int, b2: int, p2: int) -> float:
        key = m, b, p, m2, b2, p2
        if key not in self._beside:
            c = self.constants
            i = f32(c[0] * (self._l2[m][b] * (p / 100)))
            i += f32(c[1] * (self._l2[m2][b2] * (p2 / 100)))
            i += f32(c[2] * (self._dram[m][b] * (p / 100)))
            i += f32(c[3] * (self._dram[m2][b2] * (p2 / 100)))
            i = max(1.0, f32(i + c[4]))
            raw = self.raw(m, p)[b]
            over = f32(self.models[m].overhead[b])
            self._beside[key] = f32(f32(f32(raw + over) + f32(raw * f32(i - 1))) * self.ratio)
        return self._beside[key]

    def saturated(self, m: int, p: int) -> tuple[int, float]:
        key = m, p
        if key not in self._sat:
            curve = self.alone(m, p)
            slo = self.models[m].slo
            b = largest(lambda b: f32(2 * curve[b]) <= slo) or 1
            self._sat[key] = b, f32(f32(1000 * b) / curve[b])
        return self._sat[key]

    def efficient(self, m: int, sizes: Sequence[int]) -> int:
        best, at = 0.0, sizes[0]
        for a, b in pairwise(sizes):
            if b == 100:
                continue
            ta, tb = self.saturated(m, a)[1], self.saturated(m, b)[1]
            if f32(tb / ta) < f32(1.05):
                continue
            step = f32(f32(tb - ta) / (b - a))
            if step > best:
                best, at = step, b
        return at


def largest(feasible) -> int:
    low, high, found = 1, 32, 0
    while high - low > 1:
        mid = (low + high) // 2
        if feasible(mid):
            low = found = mid
        else:
            high = mid
    if not found and feasible(1):
        found = 1
    return found


class Task(msgspec.Struct, eq=False):
    model: int
    rate: int
    batch: int
    throughput: float


class Node(msgspec.Struct, eq=False):
    gpu: int
    size: int
    dedup: int = 0
    tasks: list[Task] = []
    duty: float = 0.0
    occupancy: float = 0.0


class Want(msgspec.Struct, eq=False):
    size: int
    task: Task
    duty: float
    occupancy: float


class Schedule(msgspec.Struct, frozen=True):
    schedulable: bool
    gpulets: tuple[tuple[int, int, int, str, int, float], ...] = ()

    def text(self) -> str:
        return ";".join(f"{g}:{p}:{d}:{m}:{b}:{t:.6f}" for g, p, d, m, b, t in self.gpulets)


class Program:
    def __init__(self, tables: Tables, mode: Mode, layout: Sequence[tuple[int, ...]], split: bool) -> None:
        self.t = tables
        self.mode = mode
        self.split = split
        self.gpus: list[list[Node]] = []
        for g, parts in enumerate(layout):
            nodes = []
            for p in parts:
                nodes.append(Node(g, p, int(any(n.size == p for n in nodes)), []))
            self.gpus.append(nodes)

    # -- reading
    def neighbour(self, node: Node) -> Node | None:
        for other in self.gpus[node.gpu]:
            if other is not node:
                return other
        return None

    def lat(self, m: int, b: int, p: int, other: Node | None) -> float:
        if not self.mode.interference or other is None or not other.tasks:
            return self.t.alone(m, p)[b]
        return max(self.t.beside(m, b, p, t.model, t.batch, other.size) for t in other.tasks)

    def memory_left(self, gpu: int) -> float:
        used = 0
        for node in self.gpus[gpu]:
            for task in node.tasks:
                used += self.t.models[task.model].memory
            used += CONTEXT_MB * bool(node.tasks)
        return self.t.memory * 0.9 - used

    def memory_ok(self, node: Node, m: int) -> bool:
        need = self.t.models[m].memory + (0 if node.tasks else CONTEXT_MB)
        return self.memory_left(node.gpu) > need

    def network(self, gpu: int) -> float:
        return (
            sum(t.throughput * self.t.models[t.model].input_bytes for n in self.gpus[gpu] for t in n.tasks)
            * 8
            / 1024**3
        )

    # -- estimate
    def residue(self, m: int, rate: int, p: int, other: Node | None = None) -> tuple[int, int]:
        curve, slo = self.t.alone(m, p), self.t.models[m].slo
        if other is not None and other.tasks and self.mode.interference:
            curve = [0.0] + [self.lat(m, b, p, other) for b in range(1, 33)]
        b = largest(lambda b: f32(curve[b] + f32(f32(1000 * b) / rate)) <= slo)
        if b:
            return b, rate
        if curve[1] < f32(1000 / rate) and curve[1] < slo:
            return 1, int(1000 / (slo - curve[1]) * 1.1)
        return 0, rate

    def estimate(self, m: int, rate: int) -> list[Want] | None:
        p = self.t.efficient(m, self.mode.sizes)
        b, trp = self.t.saturated(m, p)
        wants = []
        while trp < rate:
            wants.append(Want(p, Task(m, int(trp), b, trp), self.t.alone(m, p)[b], 1.0))
            rate = int(f32(rate - trp))
        if rate > SLACK:
            b, rate = self.residue(m, rate, p)
            if not b:
                return None
            slo = self.t.models[m].slo
            gather = f32(b * f32(1000 / rate))
            for q in reversed([q for q in self.mode.sizes if q < p]):
                lat = self.t.alone(m, q)[b]
                if not (gather >= lat and f32(lat + gather) <= slo):
                    break
                p = q
            lat = self.t.alone(m, p)[b]
            duty = max(gather, lat)
            wants.append(Want(p, Task(m, rate, b, f32(f32(1000 * b) / duty)), duty, f32(lat / duty)))
        wants.sort(key=lambda w: -w.size)
        return wants

    # -- find
    def unharmed(self, node: Node) -> bool:
        other = self.neighbour(node)
        if other is None:
            return True
        for task in other.tasks:
            over = f32(self.t.models[task.model].overhead[task.batch])
            if f32(over + f32(2 * other.duty)) > self.t.models[task.model].slo:
                return False
        return True

    def find(self, want: Want, left: Mapping[int, int]) -> Node | None:
        best, excess = None, 1000
        m, b = want.task.model, want.task.batch
        for node in self.nodes():
            free = left.get(id(node), node.size)
            if node.tasks or free < want.size or not self.memory_ok(node, m):
                continue
            lat = self.lat(m, b, want.size, self.neighbour(node))
            if f32(lat + want.duty) > self.t.models[m].slo or not self.unharmed(node):
                continue
            over = 0 if node.size == 100 else node.size - want.size
            if over <= excess:
                best, excess = node, over
        return best

    def nodes(self) -> list[Node]:
        return [node for gpu in self.gpus for node in gpu]

    def check_fit(self, wants: Sequence[Want]) -> bool:
        left: dict[int, int] = {}
        for want in wants:
            node = self.find(want, left)
            if node is None:
                return False
            if node.size == 100 and self.split:
                left[id(node)] = left.get(id(node), 100) - want.size
            else:
                left[id(node)] = 0
        return True

    def cut(self, node: Node, size: int) -> Node:
        """Split a whole node; the first half keeps its identity."""
        rest = Node(node.gpu, 100 - size, int(size == 50), [])
        node.size = size
        self.gpus[node.gpu].append(rest)
        return node

    def allocate_fit(self, wants: Sequence[Want]) -> int | None:
        additional = 0
        for at, want in enumerate(wants):
            node = self.find(want, {})
            if node is None:
                return None
            if node.size == 100 and want.size < 100 and self.split:
                self.cut(node, want.size)
            task = want.task
            m = task.model
            slo = self.t.models[m].slo
            node.tasks = [task]
            node.duty, node.occupancy = want.duty, want.occupancy
            if node.size > want.size:
                other = (
                    next((n for n in reversed(self.gpus[at]) if n is not node), None) if at < len(self.gpus) else None
                )
                curve = [0.0] + [self.lat(m, b, node.size, other) for b in range(1, 33)]
                if want.occupancy == 1.0:
                    b = largest(lambda b: f32(2 * curve[b]) <= slo) or 1
                    task.batch, node.duty = b, curve[b]
                    task.throughput = f32(f32(1000 * b) / curve[b])
                else:
                    b, rate = self.residue(m, task.rate, node.size, other)
                    task.batch = b
                    node.duty = max(f32(f32(1000 * b) / rate), curve[b])
                    task.throughput = f32(f32(1000 * b) / node.duty)
                    node.occupancy = f32(curve[b] / node.duty)
            if self.mode.interference:
                for n in self.gpus[node.gpu]:
                    additional += self.adjust(n) or 0
        return additional

    def adjust(self, node: Node) -> int | None:
        """Throughput lost, or None where it does not hold."""
        other = self.neighbour(node)
        if not node.tasks:
            return 0
        if len(node.tasks) == 1 and node.occupancy == 1.0:
            task = node.tasks[0]
            slo = self.t.models[task.model].slo
            before = task.throughput
            lat = self.lat(task.model, task.batch, node.size, other)
            if not f32(2 * lat) < slo:
                while f32(2 * lat) > slo:
                    task.batch -= 1
                    if task.batch == 0:
                        return None
                    lat = self.lat(task.model, task.batch, node.size, other)
                node.duty = lat
            task.throughput = f32(f32(1000 * task.batch) / lat)
            return max(0, int(f32(before - task.throughput)))
        total = 0.0
        for task in node.tasks:
            total = f32(total + self.lat(task.model, task.batch, node.size, other))
        if all(f32(total + node.duty) <= 1.05 * self.t.models[t.model].slo for t in node.tasks):
            return 0
        least = node.duty
        for task in node.tasks:
            duty, batch = node.duty, task.batch
            slo = self.t.models[task.model].slo
            while True:
                b = task.batch - 1
                if b == 0:
                    return None
                duty = f32(duty * f32(b / batch))
                task.batch = b
                if f32(self.lat(task.model, b, node.size, other) + duty) <= 1.05 * slo:
                    break
            least = min(least, duty)
        node.duty = least
        lost = 0
        for task in node.tasks:
            before = task.throughput
            task.throughput = f32(f32(1000 * task.batch) / node.duty)
            lost += max(0, int(before - task.throughput))
        return lost

    def readjust(self, m: int, rate: int, first: int) -> int:
        slo = self.t.models[m].slo
        for node in sorted((n for n in self.nodes() if not n.tasks), key=lambda n: -n.size):
            if rate <= SLACK:
                break
            if not self.memory_ok(node, m):
                continue
            size = min(node.size, first) if node.size == 100 and self.split else node.size
            other = self.neighbour(node)
            curve = self.t.alone(m, size)
            if other is not None and other.tasks and self.mode.interference:
                curve = [0.0] + [self.lat(m, b, size, other) for b in range(1, 33)]
            b = largest(lambda b: f32(2 * curve[b]) <= slo) or 1
            trp = f32(f32(1000 * b) / curve[b])
            if trp <= rate:
                if f32(2 * curve[b]) > slo:
                    continue
                task, duty, occ = Task(m, int(trp), b, trp), curve[b], 1.0
                rest = int(f32(rate - trp))
            else:
                b, r = self.residue(m, rate, size, self.neighbour(node))
                if not b:
                    continue
                duty = max(f32(f32(1000 * b) / r), curve[b])
                occ = f32(curve[b] / duty)
                task = Task(m, r, b, f32(f32(1000 * b) / duty))
                rest = 0
            if size < node.size:
                self.cut(node, size)
            node.tasks, node.duty, node.occupancy = [task], duty, occ
            before = task.throughput
            if self.mode.interference:
                for n in (node, self.neighbour(node)):
                    if n and self.adjust(n) is None:
                        node.tasks = []
                        break
                else:
                    rate = max(0, int(f32(rate - task.throughput)))
            else:
                rate = rest
        return rate

    def merge_residue(self, m: int) -> None:
        mine = [n for n in self.nodes() if len(n.tasks) == 1 and n.tasks[0].model == m and n.occupancy < 1]
        if not mine:
            return
        total = int(f32(sum(n.tasks[0].throughput for n in mine)))
        least = min(mine, key=lambda n: self.t.saturated(m, n.size)[1])
        if self.t.saturated(m, least.size)[1] < total:
            return
        b, rate = self.residue(m, total, least.size, self.neighbour(least))
        if not b:
            return
        for n in mine:
            n.tasks = []
        curve = [0.0] + [self.lat(m, b, least.size, self.neighbour(least)) for b in range(1, 33)]
        least.duty = max(f32(f32(1000 * b) / rate), curve[b])
        least.occupancy = f32(curve[b] / least.duty)
        least.tasks = [Task(m, rate, b, f32(f32(1000 * b) / least.duty))]
        self.close()

    def close(self) -> None:
        """GPUs left empty become whole again."""
        if self.split:
            for g, nodes in enumerate(self.gpus):
                if not any(n.tasks for n in nodes):
                    self.gpus[g] = [Node(g, 100, 0, [])]

    def timeshare(self, m: int, rate: int) -> int:
        while rate > SLACK:
            candidates = sorted(
                (n for n in self.nodes() if n.tasks and self.memory_ok(n, m) and n.occupancy < 1 and len(n.tasks) < 3),
                key=lambda n: -n.occupancy,
            )
            for node in candidates:
                if all(t.model != m for t in node.tasks) and (got := self.join(node, m, rate)):
                    rate = int(f32(rate - got))
                    break
            else:
                break
        return rate

    def join(self, node: Node, m: int, rate: int) -> float:
        other = self.neighbour(node)
        slo = self.t.models[m].slo
        for b in range(min(32, int(node.duty * rate / 1000)), 0, -1):
            duty = int(f32(1000 * b) / rate)
            lat = self.lat(m, b, node.size, other)
            if f32(duty + lat) < slo and f32(lat / duty) < f32(1 - node.occupancy):
                break
        else:
            return 0.0
        if duty > node.duty:
            return 0.0
        tasks = [(t.model, t.rate, max(1, int(f32(duty * t.rate) / 1000))) for t in node.tasks] + [(m, rate, b)]
        total = 0.0
        for model, _, batch in tasks:
            total = f32(total + self.lat(model, batch, node.size, other))
        if f32(total / duty) > 1:
            return 0.0
        if any(f32(total + duty) > self.t.models[model].slo for model, _, _ in tasks):
            return 0.0
        node.duty = float(duty)
        node.tasks = [Task(model, r, batch, f32(f32(1000 * batch) / duty)) for model, r, batch in tasks]
        node.occupancy = f32(total / duty)
        return node.tasks[-1].throughput

    def place(self, m: int, rate: int, share: bool = True) -> int:
        wants = self.estimate(m, rate)
        left = rate
        if wants is not None:
            got = self.allocate_fit(wants) if self.check_fit(wants) else None
            if got is None:
                done = sum(t.throughput for n in self.nodes() for t in n.tasks if t.model == m)
                left = self.readjust(m, int(rate - done), wants[0].size if wants else 100)
                self.merge_residue(m)
            else:
                left = got
        if left > SLACK and (share or left == rate):
            left = self.timeshare(m, left)
        return left

    def run(self, rates: Mapping[int, int]) -> bool:
        order = sorted(rates, key=lambda m: (rates[m] * self.t.models[m].slo, -m))
        if not all(self.place(m, rates[m]) <= SLACK for m in order):
            return False
        if self.mode.interference:
            for m in [m for m in order if self.short(m, rates[m])]:
                for n in self.nodes():
                    if any(t.model == m for t in n.tasks):
                        n.tasks = [t for t in n.tasks if t.model != m]
                        n.occupancy = f32(sum(self.lat(t.model, t.batch, n.size, self.neighbour(n)) for t in n.tasks) / n.duty)
                self.close()
                self.place(m, rates[m], share=False)
                if self.short(m, rates[m]):
                    return False
        return True

    def short(self, m: int, rate: int) -> bool:
        got = f32(sum(t.throughput for n in self.nodes() for t in n.tasks if t.model == m))
        return got < 0.85 * rate

    def schedule(self) -> Schedule:
        return Schedule(
            True,
            tuple(
                (n.gpu, n.size, n.dedup, self.t.names[t.model], t.batch, n.duty) for n in self.nodes() for t in n.tasks
            ),
        )


def schedule(tables: Tables, rates: Mapping[str, int], mode: Mode) -> Schedule:
    wanted = {tables.names.index(name): inflate(rate) for name, rate in rates.items() if rate > 0}
    if mode.search:
        for layout in product(mode.layouts, repeat=mode.gpus):
            program = Program(tables, mode, layout[::-1], split=False)
            if program.run(wanted):
                return program.schedule()
        return Schedule(False)
    program = Program(tables, mode, [(100,)] * mode.gpus, split=len(mode.sizes) > 1)
    return program.schedule() if program.run(wanted) else Schedule(False)
