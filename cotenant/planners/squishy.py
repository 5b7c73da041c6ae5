"""Squishy bin packing: whole devices, shared in time only.

Nexus (SOSP 2019), Algorithm 1, which the gpulet paper takes as its temporal baseline (section 2.2). A model first gets
as many devices to itself as it can saturate. What is left of each becomes a residue with a duty cycle d, the time to
gather its batch b at its rate r; residues are merged, the fullest first, each into the node where they fill most: two
share a device if, in the shorter of their duty cycles, both can run what gathers meanwhile.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    build_plan,
    fits_device,
    latency_curve,
    max_throughput_batch,
    sorted_by_price,
)


class Node(msgspec.Struct, frozen=True):
    """Models that share a device in time, on each of `count` devices. duty: seconds; occupancy: the part of it that
    they run."""

    rates: dict[str, float]
    duty: float
    occupancy: float
    count: int = 1


def plan(problem: Problem) -> Plan:
    left = {model: rate for model, rate in problem.rates.items() if rate > 0}
    bins: list[DeviceDraft] = []
    for kind in sorted_by_price(problem.fleet):
        nodes = _pack(problem, kind, left)
        # Where there are too few devices, those that do most work are worth most.
        nodes.sort(key=lambda node: -node.occupancy)
        free = math.inf if kind.count is None else kind.count
        for node in nodes:
            count = int(min(node.count, free))
            if count == 0:
                break
            free -= count
            bins.append(DeviceDraft(kind, [PartitionDraft(kind.cuts[-1], node.rates)], count))
            for model, rate in node.rates.items():
                left[model] -= rate * count
        left = {model: rate for model, rate in left.items() if rate > ROUNDING_TOLERANCE * problem.rates[model]}
    return build_plan(problem, "squishy", bins)


def _pack(problem: Problem, kind: Kind, rates: dict[str, float]) -> list[Node]:
    """Nodes for all the rates, as if there were devices enough; without the models that this kind cannot serve."""
    curves = {model: latency_curve(problem, model, kind.name, kind.cuts[-1]) for model in rates}
    nodes: list[Node] = []
    residues: list[Node] = []
    for model, rate in rates.items():
        slo = problem.model(model).slo
        batch, most = max_throughput_batch(curves[model], slo)
        if batch == 0 or not fits_device(problem, kind, [PartitionDraft(kind.cuts[-1], {model: most})]):
            continue
        whole = math.floor(rate / most * (1 + ROUNDING_TOLERANCE))
        if whole:
            nodes.append(Node({model: most}, curves[model][batch - 1], 1.0, whole))
        rest = rate - whole * most
        if rest > ROUNDING_TOLERANCE * rate:
            residues.append(_residue(model, rest, curves[model], slo))
    residues.sort(key=lambda node: -node.occupancy)
    merged: list[Node] = []
    for residue in residues:
        choices = [(i, _merge(problem, kind, curves, node, residue)) for i, node in enumerate(merged)]
        able = [(i, node) for i, node in choices if node is not None]
        if able:
            i, node = max(able, key=lambda choice: choice[1].occupancy)
            merged[i] = node
        else:
            merged.append(residue)
    return nodes + merged


def _residue(model: str, rate: float, curve: tuple[float, ...], slo: float) -> Node:
    """The largest batch that can be gathered and run in time. At a rate so low that not even one request can be waited
    for, the duty cycle is what the target leaves for waiting."""
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
