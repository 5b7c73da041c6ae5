"""The integer program: how many devices get each cutting, and how many partitions run each mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import highspy
import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, PartitionSize

Array = NDArray[np.float64]


class MilpInstance(msgspec.Struct, frozen=True):
    """What is asked of any mix of modes.

    rates: requests/s of each model. counts: devices of each kind at most (inf: endless); prices: of one.
    rooms: bytes on one device of each kind, where partitions share them and could need more; else None.
    scale: whether to serve the largest multiple of the rates; else the rates, as cheaply as can be.
    """

    rates: Array
    counts: Sequence[float]
    prices: Sequence[float]
    memory_limits: Sequence[int | None]
    scale: bool


class MilpSolution(msgspec.Struct, frozen=True):
    """value: of the objective. bound: what no answer can beat. modes, cuttings: how many of each.

    In units of the objective, what is worth: `worth` one request/s of each model; `price` one partition on each slot;
    `more` one more device of each kind, and `room` the memory of one.
    """

    value: float
    bound: float
    modes: Array
    patterns: Array
    demand_duals: Array
    slot_duals: Array
    device_duals: Array
    memory_duals: Array


def solve_milp(
    instance: MilpInstance,
    slots: Sequence[PartitionSize],
    patterns: Sequence[CuttingPattern],
    modes: Sequence[Mode],
    *,
    whole: bool = True,
    clip: Array | None = None,
    favour: Sequence[int] = (),
    stays: int = 1,
    least: Mapping[Mode | CuttingPattern, float] | None = None,
    gap: float = 1e-3,
    nodes: int = 1000,
    seconds: float = math.inf,
) -> tuple[MilpSolution | None, float]:
    """The best mix of modes, and the seconds that it took; None where none serves the rates, or none was found.

    whole: whether numbers of partitions and devices are whole. clip: of what a partition carries of a model, the most
    that counts. favour: modes that win a tie, and `stays` how many partitions may. least: of each mode and cutting, the
    least number.
    nodes, seconds: when to stop searching.
    """
    models, kinds = len(instance.rates), len(instance.counts)
    # Columns: the scale, cuttings, modes. Rows: devices and memory of each kind, slots, models.
    at_cutting, at_mode = 1, 1 + len(patterns)
    at_memory, at_slot, at_model = kinds, 2 * kinds, 2 * kinds + len(slots)
    columns, rows = at_mode + len(modes), at_model + models
    entries: list[tuple[int, int, float]] = []
    for n, pattern in enumerate(patterns):
        entries.append((pattern.kind, at_cutting + n, 1.0))
        if instance.memory_limits[pattern.kind] is not None:
            entries.append((at_memory + pattern.kind, at_cutting + n, -1.0))
        entries += [(at_slot + s, at_cutting + n, -float(many)) for s, many in pattern.pieces]
    for n, mode in enumerate(modes):
        kind = slots[mode.slot].kind
        room = instance.memory_limits[kind]
        if room is not None:
            entries.append((at_memory + kind, at_mode + n, mode.memory / room))
        for i, rate in zip(mode.models, mode.rates, strict=True):
            counted = rate if clip is None else min(rate, float(clip[i]))
            entries.append((at_model + i, at_mode + n, counted))
        entries.append((at_slot + mode.slot, at_mode + n, 1.0))
    entries += [(at_model + i, 0, -float(rate)) for i, rate in enumerate(instance.rates)]
    cost = np.zeros(columns)
    if instance.scale:
        cost[0] = 1.0
    else:
        cost[at_cutting:at_mode] = [instance.prices[pattern.kind] for pattern in patterns]
    # All that stays together weighs less than half a device.
    bonus = 1e-5 if instance.scale else -0.5 * min(instance.prices) / (len(favour) + stays)
    for n in favour:
        cost[at_mode + n] += bonus
    low, high = np.full(rows, -math.inf), np.zeros(rows)
    high[:kinds] = instance.counts
    low[at_model:], high[at_model:] = 0.0, math.inf
    lower, upper = np.zeros(columns), np.full(columns, math.inf)
    if not instance.scale:
        lower[0] = upper[0] = 1.0
    if least:
        lower[at_cutting:at_mode] = [least.get(pattern, 0.0) for pattern in patterns]
        lower[at_mode:] = [least.get(mode, 0.0) for mode in modes]
    integral = np.zeros(columns, dtype=bool)
    if whole:
        integral[at_cutting:] = True
    program = _program(entries, cost, (low, high), (lower, upper), integral if whole else None, maximise=instance.scale)
    program.setOptionValue("mip_rel_gap", gap)
    program.setOptionValue("mip_max_nodes", nodes)
    program.setOptionValue("time_limit", seconds)
    program.run()
    took = program.getRunTime()
    info = program.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, took
    solution = program.getSolution()
    values, duals = np.array(solution.col_value), np.array(solution.row_dual)
    answer = MilpSolution(
        value=info.objective_function_value,
        bound=info.mip_dual_bound if whole else info.objective_function_value,
        modes=np.rint(values[at_mode:]) if whole else values[at_mode:],
        patterns=np.rint(values[at_cutting:at_mode]) if whole else values[at_cutting:at_mode],
        demand_duals=np.abs(duals[at_model:]) if len(duals) else np.zeros(models),
        slot_duals=np.abs(duals[at_slot:at_model]) if len(duals) else np.zeros(len(slots)),
        device_duals=np.abs(duals[:kinds]) if len(duals) else np.zeros(kinds),
        memory_duals=np.abs(duals[at_memory:at_slot]) if len(duals) else np.zeros(kinds),
    )
    return answer, took


def _program(
    entries: Sequence[tuple[int, int, float]],
    cost: Array,
    rows: tuple[Array, Array],
    columns: tuple[Array, Array],
    integral: NDArray[np.bool_] | None,
    *,
    maximise: bool,
) -> highspy.Highs:
    program = highspy.Highs()  # type: ignore[no-untyped-call]
    program.setOptionValue("output_flag", False)
    program.setOptionValue("threads", 1)
    row, column, value = (np.array(each) for each in zip(*entries, strict=True))
    order = np.argsort(column, kind="stable")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(rows[0])
    lp.col_cost_ = cost
    lp.col_lower_, lp.col_upper_ = columns
    lp.row_lower_, lp.row_upper_ = rows
    lp.sense_ = highspy.ObjSense.kMaximize if maximise else highspy.ObjSense.kMinimize
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(column, minlength=len(cost))))).astype(np.int32)
    lp.a_matrix_.index_ = row[order].astype(np.int32)
    lp.a_matrix_.value_ = value[order].astype(np.float64)
    if integral is not None:
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in integral]
    program.passModel(lp)
    return program
