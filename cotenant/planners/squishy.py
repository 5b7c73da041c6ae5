"""Plan by squishy bin packing: whole devices, shared in time only.

Nexus (SOSP 2019), Algorithm 1, the gpulet paper's temporal baseline (section 2.2). A model first gets as many devices
to itself as it can saturate. The rest of each rate becomes a residue with a duty cycle d, the time in which its batch b
gathers at its rate r. Residues are merged in order of decreasing occupancy, each into the node of highest resulting
occupancy: two share a device if, in the shorter of their duty cycles, both can run what gathers meanwhile.

Where the papers differ, or say nothing:

- Nexus saturates with the largest batch that takes half of the target; here it is the one of highest throughput among
  those, which is the same unless larger batches are slower for each row;
- gpulet's text merges pairs of residues until none can be; Nexus' Algorithm 1 takes each residue once, as here;
- a residue whose second request would come too late has the duty cycle that its target leaves; Nexus has none for it;
- both have as many devices as they need: where there are too few, those go to the fullest nodes; several kinds are
  used up from the cheapest;
- gpulet's published program shares in time only as a last resort, with batches up to 31: see
  `experiments/gpulet/published`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    fits_device,
    latency_curve,
    max_throughput_batch,
)
from cotenant.planners.kind_by_kind import plan_kind_by_kind


class Node(msgspec.Struct, frozen=True):
    """Describe models that time-share a device, on each of `count` devices.

    duty: duty cycle in seconds; occupancy: the fraction of it in which they run.
    """

    rates: dict[str, float]
    duty: float
    occupancy: float
    count: int = 1


def plan(problem: Problem) -> Plan:
    """Plan by squishy bin packing, on the cheapest kind first."""
    return plan_kind_by_kind(problem, "squishy", lambda kind, rates: _place(problem, kind, rates))


def _place(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    """Give nodes devices; with too few devices, the fullest nodes get one."""
    devices: list[DeviceDraft] = []
    free = math.inf if kind.count is None else kind.count
    for node in sorted(_pack(problem, kind, rates), key=lambda node: -node.occupancy):
        count = int(min(node.count, free))
        if count == 0:
            break
        free -= count
        devices.append(DeviceDraft(kind, [PartitionDraft(kind.cuts[-1], node.rates)], count))
    return devices


def _pack(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[Node]:
    """Return nodes for all rates, as if devices were unlimited; without models that this kind cannot serve."""
    curves = {model: latency_curve(problem, model, kind.name, kind.cuts[-1]) for model in rates}
    nodes: list[Node] = []
    residues: list[Node] = []
    for model, rate in rates.items():
        slo = problem.model(model).slo
        batch, max_rate = max_throughput_batch(curves[model], slo)
        if batch == 0 or not fits_device(problem, kind, [PartitionDraft(kind.cuts[-1], {model: max_rate})]):
            continue
        saturated = math.floor(rate / max_rate * (1 + ROUNDING_TOLERANCE))
        if saturated:
            nodes.append(Node({model: max_rate}, curves[model][batch - 1], 1.0, saturated))
        residual = rate - saturated * max_rate
        if residual > ROUNDING_TOLERANCE * rate:
            residues.append(_residue(model, residual, curves[model], slo))
    residues.sort(key=lambda node: -node.occupancy)
    merged: list[Node] = []
    for residue in residues:
        choices = [(i, _merge(problem, kind, curves, node, residue)) for i, node in enumerate(merged)]
        feasible = [(i, node) for i, node in choices if node is not None]
        if feasible:
            i, node = max(feasible, key=lambda choice: choice[1].occupancy)
            merged[i] = node
        else:
            merged.append(residue)
    return nodes + merged


def _residue(model: str, rate: float, curve: tuple[float, ...], slo: float) -> Node:
    """Return a node with the largest batch that gathers and runs within the target.

    At rates so low that no second request arrives in time, the duty cycle is what the target leaves for waiting.
    """
    batch = max((b for b, latency in enumerate(curve, 1) if latency + b / rate <= slo), default=1)
    latency = curve[batch - 1]
    duty = min(batch / rate, slo - latency)
    return Node({model: rate}, duty, latency / duty)


def _merge(problem: Problem, kind: Kind, curves: dict[str, tuple[float, ...]], a: Node, b: Node) -> Node | None:
    duty = min(a.duty, b.duty)
    rates = a.rates | b.rates
    busy = 0.0
    for model, rate in rates.items():
        batch = math.ceil(duty * rate * (1 - ROUNDING_TOLERANCE))
        if batch > len(curves[model]):
            return None
        busy += curves[model][batch - 1]
    if busy > duty or not fits_device(problem, kind, [PartitionDraft(kind.cuts[-1], rates)]):
        return None
    return Node(rates, duty, busy / duty)
