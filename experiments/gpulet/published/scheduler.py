"""Schedule models on gpulets, step by step as the published program does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import msgspec

from cotenant.errors import ConfigError
from experiments.gpulet.published.arithmetic import LARGEST_BATCH, f32, planned_rate, residual_batch, saturated_batch
from experiments.gpulet.published.gpus import Gpus, Node, Task
from experiments.gpulet.published.modes import ELASTIC, Mode, Schedule
from experiments.gpulet.published.tables import Tables

MAX_TASKS = 3  # in one gpulet, "Max Model"
IGNORED_RATE = 15  # requests/s: a smaller remainder of a rate is ignored everywhere (1.1)
MIN_SERVED_FRACTION = 0.85  # of the rate, in the final test with interference (1.8)


class DesiredGpulet(msgspec.Struct):
    """Describe a gpulet that a model should get (1.6). rate: requests/s; duty: ms."""

    model: int
    size: int
    rate: int
    batch: int
    duty: float
    occupancy: float


def schedule(tables: Tables, rates: Mapping[str, int], mode: Mode = ELASTIC) -> Schedule:
    """Schedule rates, in whole requests/s by model, as the published program does.

    Raises ConfigError for unknown models.
    """
    for name in rates:
        if name not in tables.numbers:
            raise ConfigError(f"{name}: not in the tables, which have {', '.join(tables.numbers)}")
    wanted = {tables.numbers[name]: planned_rate(rate) for name, rate in rates.items() if rate > 0}
    for layout in product(mode.layouts or ((100,),), repeat=mode.gpus):
        # The last GPU's layout changes slowest.
        program = _Scheduler(tables, mode, layout[::-1])
        if program.serve(wanted):
            return Schedule(schedulable=True, gpulets=tuple(program.gpus.gpulets()))
    return Schedule(schedulable=False)


class _Scheduler:
    """Serve rates on GPUs of one layout."""

    def __init__(self, tables: Tables, mode: Mode, layout: Sequence[tuple[int, ...]]) -> None:
        self.tables = tables
        self.mode = mode
        self.gpus = Gpus(tables, mode, layout)

    def serve(self, rates: Mapping[int, int]) -> bool:
        """Schedule models in order of rate · SLO, ties by the larger number first; return success (1.7, end of 1.8)."""
        order = sorted(rates, key=lambda model: (rates[model] * self.tables.models[model].slo, -model))
        for model in order:
            left, _ = self._place(model, rates[model])
            if left > IGNORED_RATE and self._time_share(model, left) > IGNORED_RATE:
                return False
        if not self.mode.interference:
            return True
        # Models that interference slows too much are collected first and placed once more; the effect on others is not
        # checked again. Time sharing is tried here only if no gpulet at all was found.
        for model in [model for model in order if self._falls_short(model, rates[model])]:
            self.gpus.remove(model)
            left, placed = self._place(model, rates[model])
            if not placed:
                self._time_share(model, left)
            if self._falls_short(model, rates[model]):
                return False
        return True

    def _place(self, model: int, rate: int) -> tuple[int, bool]:
        """Place a model; return the remaining rate and whether any was placed (1.7, steps 1 to 5)."""
        desired = self._estimate(model, rate)
        if desired is not None and self._would_fit(desired):
            self._allocate(desired)
        # What was allocated stays, also where some gpulet was not found.
        left = int(rate - self.gpus.throughput(model))
        if left <= IGNORED_RATE:
            return 0, True
        left = self._place_on_empty(model, left, desired[0].size if desired else 100)
        self._merge_residues(model)
        return left, left < rate

    def _estimate(self, model: int, rate: int) -> list[DesiredGpulet] | None:
        """Return saturated gpulets of size p_eff and one for the residual rate; None if that cannot be served (1.6)."""
        size = self.tables.efficient_size(model, self.mode.sizes)
        batch, most = self.tables.saturated(model, size)
        desired = []
        while most < rate:
            desired.append(DesiredGpulet(model, size, int(most), batch, self.tables.alone(model, size)[batch], 1.0))
            rate = int(f32(rate - most))
        if rate > IGNORED_RATE:
            slo = self.tables.models[model].slo
            batch, rate = residual_batch(self.tables.alone(model, size), slo, rate)
            if not batch:
                return None
            # p_req with the batch of p_eff: reduce the size step by step while that batch still meets the SLO.
            gather = f32(batch * f32(1000 / rate))
            for smaller in reversed([other for other in self.mode.sizes if other < size]):
                latency = self.tables.alone(model, smaller)[batch]
                if gather < latency or f32(latency + gather) > slo:
                    break
                size = smaller
            latency = self.tables.alone(model, size)[batch]
            duty = max(gather, latency)
            desired.append(DesiredGpulet(model, size, rate, batch, duty, f32(latency / duty)))
        return sorted(desired, key=lambda gpulet: -gpulet.size)

    def _would_fit(self, desired: Iterable[DesiredGpulet]) -> bool:
        """Return whether a dry run places all gpulets; it tracks only what is left of whole GPUs (1.7, step 2)."""
        left: dict[int, int] = {}
        for gpulet in desired:
            node = self._find(gpulet, left)
            if node is None:
                return False
            whole = node.size == 100 and self.gpus.splits
            left[id(node)] = left.get(id(node), 100) - gpulet.size if whole else 0
        return True

    def _find(self, gpulet: DesiredGpulet, left: Mapping[int, int]) -> Node | None:
        """Find the best fit: a whole GPU counts as an exact fit, and the last of equal fits wins (1.7)."""
        best, least = None, 100
        for node in self.gpus.nodes():
            if (
                node.tasks
                or left.get(id(node), node.size) < gpulet.size
                or not self.gpus.has_memory(node, gpulet.model)
            ):
                continue
            # On the size of the gpulet as it is: a whole GPU is faster than the part that will be split off.
            latency = self.gpus.latencies(gpulet.model, node.size, self.gpus.others(node))[gpulet.batch]
            if f32(latency + gpulet.duty) > self.tables.models[gpulet.model].slo or not self._neighbour_keeps_slo(node):
                continue
            excess = 0 if node.size == 100 else node.size - gpulet.size
            if excess <= least:
                best, least = node, excess
        return best

    def _neighbour_keeps_slo(self, node: Node) -> bool:
        """Test the SLOs on the other gpulet of the GPU; the program ignores the new model's interference here (1.7)."""
        return all(
            f32(f32(self.gpus.overhead(task)) + f32(2 * other.duty)) <= self.tables.models[task.model].slo
            for other in self.gpus.others(node)
            for task in other.tasks
        )

    def _allocate(self, desired: Sequence[DesiredGpulet]) -> None:
        """Allocate gpulets, up to the first that is not found (1.7, step 3)."""
        for at, gpulet in enumerate(desired):
            node = self._find(gpulet, {})
            if node is None:
                return
            if node.size == 100 and gpulet.size < 100 and self.gpus.splits:
                self.gpus.split(node, gpulet.size)
            if node.size == gpulet.size:
                self.gpus.put(node, gpulet.model, gpulet.rate, gpulet.batch, gpulet.duty, gpulet.occupancy)
            else:
                # A larger gpulet is used unchanged. The program computes its batch under co-location with the gpulets
                # of the GPU whose number is the position in the list, not of the gpulet's own GPU; without the one of
                # the same size, if that is the first of its size.
                listed = self.gpus.gpus[at] if at < len(self.gpus.gpus) else []
                others = [other for other in listed if (other.size, other.dedup) != (node.size, 0)]
                self.gpus.fill(node, gpulet.model, gpulet.rate, others, saturated=gpulet.occupancy == 1)
            for each in self.gpus.gpus[node.gpu] if self.mode.interference else ():
                if not self.gpus.reduce_batches(each) and each is node:
                    node.tasks[0].throughput = 0.0  # it stays, and is served once more elsewhere

    def _place_on_empty(self, model: int, rate: int, first: int) -> int:
        """Use empty gpulets, largest first, split whole GPUs at `first`; return the remaining rate (1.7, step 4).

        From the first that could serve more than is left on, none is saturated.
        """
        slo = self.tables.models[model].slo
        saturated = True
        for node in sorted((node for node in self.gpus.nodes() if not node.tasks), key=lambda node: -node.size):
            if rate <= IGNORED_RATE:
                break
            if not self.gpus.has_memory(node, model):
                continue
            size = min(node.size, first) if self.gpus.splits and node.size == 100 else node.size
            curve = self.gpus.latencies(model, size, self.gpus.others(node))
            batch, most = saturated_batch(curve, slo)
            saturated = saturated and most <= rate
            if saturated and f32(2 * curve[batch]) > slo:
                continue
            if size < node.size:
                self.gpus.split(node, size)
            if self.gpus.fill(
                node, model, rate, self.gpus.others(node), saturated=saturated
            ) and self.gpus.keeps_constraints(node):
                rate = max(0, int(f32(rate - node.tasks[0].throughput)))
            else:
                node.tasks = []
                self.gpus.restore_whole_gpus()
        return rate

    def _merge_residues(self, model: int) -> None:
        """Merge all residues of the model into the first free gpulet of one size (1.7, step 5).

        A single residue is merged with itself: its rate is then truncated to an integer, it may move, and what it costs
        the other gpulet of its GPU is not looked at.
        """
        mine = [
            node for node in self.gpus.nodes() if [task.model for task in node.tasks] == [model] and node.occupancy < 1
        ]
        if not mine:
            return
        total = int(f32(sum(node.tasks[0].throughput for node in mine)))
        size = min((node.size for node in mine), key=lambda size: self.tables.saturated(model, size)[1])
        if self.tables.saturated(model, size)[1] < total:
            return
        target = next(node for node in self.gpus.nodes() if node.size == size and (not node.tasks or node in mine))
        if self.gpus.fill(target, model, total, self.gpus.others(target), saturated=False):
            for node in mine:
                if node is not target:
                    node.tasks = []
            self.gpus.restore_whole_gpus()

    def _falls_short(self, model: int, rate: int) -> bool:
        return rate > IGNORED_RATE and self.gpus.throughput(model) < MIN_SERVED_FRACTION * rate

    def _time_share(self, model: int, rate: int) -> int:
        """Time-share gpulets in use, highest occupancy first; return the remaining rate (1.9)."""
        while rate > IGNORED_RATE:
            candidates = sorted(
                (
                    node
                    for node in self.gpus.nodes()
                    if 0 < len(node.tasks) < MAX_TASKS and node.occupancy < 1 and self.gpus.has_memory(node, model)
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

    def _join(self, node: Node, model: int, rate: int) -> bool:
        """Add the model to a gpulet in use; return whether every SLO is still met."""
        slo = self.tables.models[model].slo
        curve = self.gpus.latencies(model, node.size, self.gpus.others(node))
        # Only the first batch that passes in isolation is tried together with the others.
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
        busy = self.gpus.round_time(node, [(task, batch) for task, _, batch in tasks])
        if busy > duty or any(f32(busy + duty) > self.tables.models[task].slo for task, _, _ in tasks):
            return False
        # The others may now get less than they need; only the final test (MIN_SERVED_FRACTION) checks that.
        node.tasks = [Task(task, rate, batch, f32(1000 * batch / duty)) for task, rate, batch in tasks]
        node.duty, node.occupancy = float(duty), f32(busy / duty)
        return True
