"""Track the state of all GPUs while the published program plans: gpulets, their models, batches and duty cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from experiments.gpulet.published.arithmetic import f32, residual_batch, saturated_batch
from experiments.gpulet.published.modes import Gpulet, Mode
from experiments.gpulet.published.tables import Tables

CONTEXT_MB = 1230  # of a process, without its model (1.10)
USABLE_MEMORY = 0.9
NETWORK_GBIT = 3.0  # into one GPU's server, in Gbit/s of 1024³ bits


class Task(msgspec.Struct, eq=False):
    """Hold one model on a gpulet: its number, rate and throughput in requests/s, and its batch."""

    model: int
    rate: int
    batch: int
    throughput: float


class Node(msgspec.Struct, eq=False):
    """Hold one gpulet while it is planned. occupancy: busy fraction of its duty cycle; 1 means saturated."""

    gpu: int
    size: int
    dedup: int
    tasks: list[Task]
    duty: float = 0.0
    occupancy: float = 0.0


class Gpus:
    """Hold all GPUs, each a list of gpulets, and change them as the program's functions do."""

    def __init__(self, tables: Tables, mode: Mode, layout: Sequence[tuple[int, ...]]) -> None:
        self.tables = tables
        self.mode = mode
        self.splits = not mode.layouts and mode.sizes != (100,)
        self.gpus = [
            [Node(gpu, size, int(parts[:at].count(size) > 0), []) for at, size in enumerate(parts)]
            for gpu, parts in enumerate(layout)
        ]

    def gpulets(self) -> Iterator[Gpulet]:
        for node in self.nodes():
            for task in node.tasks:
                name = self.tables.models[task.model].name
                yield Gpulet(node.gpu, node.size, node.dedup, name, task.batch, node.duty, task.throughput)

    def nodes(self) -> Iterator[Node]:
        for nodes in self.gpus:
            yield from nodes

    def others(self, node: Node) -> list[Node]:
        """Return the other gpulets of the same GPU: one, or none."""
        return [other for other in self.gpus[node.gpu] if other is not node]

    def split(self, node: Node, size: int) -> None:
        node.size = size
        self.gpus[node.gpu].append(Node(node.gpu, 100 - size, int(size == 50), []))

    def restore_whole_gpus(self) -> None:
        """Undo the partitioning of GPUs without tasks."""
        if self.splits:
            for gpu, nodes in enumerate(self.gpus):
                if not any(node.tasks for node in nodes):
                    self.gpus[gpu] = [Node(gpu, 100, 0, [])]

    def latencies(self, model: int, part: int, others: Iterable[Node]) -> list[float]:
        """Return latencies in ms by batch, under co-location with gpulets: the highest over their tasks (1.4)."""
        colocated = [(task, other.size) for other in others for task in other.tasks]
        if not self.mode.interference or not colocated:
            return self.tables.alone(model, part)
        curves = [self.tables.colocated(model, part, task.model, task.batch, size) for task, size in colocated]
        return curves[0] if len(curves) == 1 else list(map(max, *curves))

    def round_time(self, node: Node, batches: Iterable[tuple[int, int]]) -> float:
        """Return the duration of one round of these models and batches, in ms."""
        others = self.others(node)
        total = 0.0
        for model, batch in batches:
            total = f32(total + self.latencies(model, node.size, others)[batch])
        return total

    def overhead(self, task: Task) -> float:
        return self.tables.models[task.model].overhead.get(task.batch, 0.0)

    def has_memory(self, node: Node, model: int) -> bool:
        """Return whether the GPU has memory for one more worker of the model (1.10)."""
        used = sum(
            CONTEXT_MB + sum(self.tables.models[task.model].memory for task in other.tasks)
            for other in self.gpus[node.gpu]
            if other.tasks
        )
        needed = self.tables.models[model].memory + (0 if node.tasks else CONTEXT_MB)
        return self.tables.memory * USABLE_MEMORY - used > needed

    def network_gbit(self, gpu: int) -> float:
        """Return the network traffic into a GPU's server, in Gbit/s (1.10)."""
        requests = (task for node in self.gpus[gpu] for task in node.tasks)
        return sum(task.throughput * self.tables.models[task.model].input_bytes for task in requests) * 8 / 1024**3

    def throughput(self, model: int) -> float:
        return f32(sum(task.throughput for node in self.nodes() for task in node.tasks if task.model == model))

    def fill(self, node: Node, model: int, rate: int, others: Iterable[Node], *, saturated: bool) -> bool:
        """Place the model on the gpulet, co-located with `others`; return False if no batch meets the SLO.

        At rates that the program has raised (1.5) the duty cycle may be shorter than the batch.
        """
        slo = self.tables.models[model].slo
        curve = self.latencies(model, node.size, others)
        if saturated:
            batch, most = saturated_batch(curve, slo)
            rate, duty = int(most), curve[batch]
        else:
            batch, rate = residual_batch(curve, slo, rate)
            if not batch:
                return False
            duty = f32(1000 * batch / rate)
        self.put(node, model, rate, batch, duty, f32(curve[batch] / duty))
        return True

    def put(self, node: Node, model: int, rate: int, batch: int, duty: float, occupancy: float) -> None:
        node.tasks = [Task(model, rate, batch, f32(1000 * batch / duty))]
        node.duty, node.occupancy = duty, occupancy

    def reduce_batches(self, node: Node) -> bool:
        """Reduce batches that miss the SLO under interference (1.8). Return False if no batch meets the SLO."""
        if len(node.tasks) == 1 and node.occupancy >= 1:
            return self._reduce_saturated(node, node.tasks[0])
        busy = self.round_time(node, [(task.model, task.batch) for task in node.tasks])
        if all(f32(busy + node.duty) <= 1.05 * self.tables.models[task.model].slo for task in node.tasks):
            return True
        duties = []
        for task in node.tasks:
            slo = self.tables.models[task.model].slo
            curve = self.latencies(task.model, node.size, self.others(node))
            first, duty = task.batch, node.duty
            while task.batch:
                task.batch -= 1
                # Compounding: the duty cycle falls faster than the batch.
                duty = f32(duty * f32(task.batch / first))
                if f32(curve[task.batch] + duty) <= 1.05 * slo:
                    break
            if not task.batch:
                return False
            duties.append(duty)
        node.duty = min(duties)
        for task in node.tasks:
            task.throughput = f32(1000 * task.batch / node.duty)
        return True

    def _reduce_saturated(self, node: Node, task: Task) -> bool:
        slo = self.tables.models[task.model].slo
        curve = self.latencies(task.model, node.size, self.others(node))
        # While the batch still meets the SLO, the program updates only its throughput, not its duty cycle.
        if f32(2 * curve[task.batch]) >= slo:
            batch = task.batch
            while batch and f32(2 * curve[batch]) > slo:
                batch -= 1
            if not batch:
                return False
            task.batch, node.duty = batch, curve[batch]
        task.throughput = f32(1000 * task.batch / curve[task.batch])
        return True

    def keeps_constraints(self, node: Node) -> bool:
        """Reduce the new batch until the network allows it, and co-located batches; return False if none is allowed."""
        (task,) = node.tasks
        while task.batch and self.network_gbit(node.gpu) > NETWORK_GBIT:
            task.batch -= 1
            task.throughput = f32(1000 * task.batch / node.duty)
        if not task.batch:
            return False
        # The program does not compensate the rate that the co-located gpulet loses here.
        return not self.mode.interference or all(self.reduce_batches(other) for other in self.others(node))

    def remove(self, model: int) -> None:
        for node in self.nodes():
            others = [task for task in node.tasks if task.model != model]
            if len(others) < len(node.tasks):
                node.tasks = others
                node.occupancy = f32(self.round_time(node, [(task.model, task.batch) for task in others]) / node.duty)
        self.restore_whole_gpus()
