"""Solve the relaxation that bounds every plan: how many devices get each pattern, how many partitions run each mode.

With whole devices of each kind it bounds more: a fleet never costs less than the cheapest whole number of devices that
serves the rates where patterns and modes may be divided. There are as many integers as kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import highspy
import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, PartitionSize
from cotenant.planners.geometry.solver import checks_for, run_solver, seconds_per_check, seconds_per_iteration

Array = NDArray[np.float64]

MAX_NODES = 1000  # for whole devices
WHOLE_DEVICES_SHARE = 0.1  # of the work left that whole devices may take
# Seconds of work, besides simplex iterations: for each program and column.
SECONDS_PER_CALL = 1e-3
SECONDS_PER_COLUMN = 1e-5


class MilpInstance(msgspec.Struct, frozen=True):
    """Hold the data of the program, apart from its columns.

    rates: requests/s of each model. counts: devices of each kind at most (inf: unlimited); prices: of one.
    memory_limits: bytes on one device of each kind, where partitions share them and could need more; else None.
    maximize_scale: serve the largest multiple of the rates; else the rates at the least cost.
    """

    rates: Array
    counts: Sequence[float]
    prices: Sequence[float]
    memory_limits: Sequence[int | None]
    maximize_scale: bool


class MilpSolution(msgspec.Struct, frozen=True):
    """Hold a solution of the program. value: of the objective. bound: proven on it. modes, patterns: how many of each.
    devices: of each kind, where whole ones are required.

    Dual values, in units of the objective: of one request/s of each model, of one partition on each slot, of one more
    device of each kind, and of one device's memory; zeros with whole devices.
    """

    value: float
    bound: float
    modes: Array
    patterns: Array
    devices: tuple[int, ...]
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
    budget: WorkBudget | None = None,
    whole_devices: bool = False,
) -> MilpSolution | None:
    """Return the best mix of modes; None where the rates are infeasible, or nothing was found.

    whole_devices: require a whole number of devices of each kind. budget: what the solver takes is counted there; with
    whole devices it may take a part of what is left.
    """
    models, kinds = len(instance.rates), len(instance.counts)
    # Columns: the scale, whole devices of each kind, patterns, modes. Rows: devices and memory of each kind, slots,
    # models.
    at_cutting = 1 + kinds * whole_devices
    at_mode = at_cutting + len(patterns)
    at_memory, at_slot, at_model = kinds, 2 * kinds, 2 * kinds + len(slots)
    columns, rows = at_mode + len(modes), at_model + models
    entries = [(k, 1 + k, -1.0) for k in range(kinds * whole_devices)]
    for n, pattern in enumerate(patterns):
        entries.append((pattern.kind, at_cutting + n, 1.0))
        if instance.memory_limits[pattern.kind] is not None:
            entries.append((at_memory + pattern.kind, at_cutting + n, -1.0))
        entries += [(at_slot + s, at_cutting + n, -float(many)) for s, many in pattern.pieces]
    for n, mode in enumerate(modes):
        kind = slots[mode.slot].kind
        memory_limit = instance.memory_limits[kind]
        if memory_limit is not None:
            entries.append((at_memory + kind, at_mode + n, mode.memory / memory_limit))
        for i, rate in zip(mode.models, mode.rates, strict=True):
            entries.append((at_model + i, at_mode + n, rate))
        entries.append((at_slot + mode.slot, at_mode + n, 1.0))
    entries += [(at_model + i, 0, -float(rate)) for i, rate in enumerate(instance.rates)]
    cost = np.zeros(columns)
    if instance.maximize_scale:
        cost[0] = 1.0
    elif whole_devices:
        cost[1:at_cutting] = instance.prices
    else:
        cost[at_cutting:at_mode] = [instance.prices[pattern.kind] for pattern in patterns]
    low, high = np.full(rows, -math.inf), np.zeros(rows)
    low[at_model:], high[at_model:] = 0.0, math.inf
    lower, upper = np.zeros(columns), np.full(columns, math.inf)
    if not instance.maximize_scale:
        lower[0] = upper[0] = 1.0
    is_integer = np.zeros(columns, dtype=bool)
    if whole_devices:
        upper[1:at_cutting] = instance.counts
        is_integer[1:at_cutting] = True
    else:
        high[:kinds] = instance.counts
    highs = _program(
        entries,
        cost,
        (low, high),
        (lower, upper),
        is_integer if whole_devices else None,
        maximise=instance.maximize_scale,
    )
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_max_nodes", MAX_NODES)
    most = math.inf if budget is None else checks_for(WHOLE_DEVICES_SHARE * budget.left(), len(entries))
    checks = run_solver(highs, most)
    info = highs.getInfo()
    if budget is not None:
        work = SECONDS_PER_CALL + SECONDS_PER_COLUMN * columns + seconds_per_check(len(entries)) * checks
        budget.spend(work + seconds_per_iteration(rows, len(entries)) * max(int(info.simplex_iteration_count), 0))
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    solution = highs.getSolution()
    column_values, duals = np.array(solution.col_value), np.array(solution.row_dual)
    if not len(duals):  # with whole devices there are none
        duals = np.zeros(rows)
    return MilpSolution(
        value=info.objective_function_value,
        bound=info.mip_dual_bound if whole_devices else info.objective_function_value,
        modes=column_values[at_mode:],
        patterns=column_values[at_cutting:at_mode],
        devices=tuple(round(count) for count in column_values[1:at_cutting]),
        demand_duals=np.abs(duals[at_model:]),
        slot_duals=np.abs(duals[at_slot:at_model]),
        device_duals=np.abs(duals[:kinds]),
        memory_duals=np.abs(duals[at_memory:at_slot]),
    )


def _program(
    entries: Sequence[tuple[int, int, float]],
    cost: Array,
    rows: tuple[Array, Array],
    columns: tuple[Array, Array],
    is_integer: NDArray[np.bool_] | None,
    *,
    maximise: bool,
) -> highspy.Highs:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
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
    if is_integer is not None:
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in is_integer]
    highs.passModel(lp)
    return highs
