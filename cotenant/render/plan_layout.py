"""Provide what tables, bars and figures of a plan need: spans on a device, colours of models, the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cotenant.core.device_groups import DeviceGroup
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import WHOLE, show_count, show_rate, show_share

# Tol's light scheme: black text stays readable on it, and colour-blind readers tell the colours apart.
FILLS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#44BB99", "#99DDFF", "#BBCC33", "#AAAA00"),
    # The same once more, lighter: for the ninth model and on.
    *("#BBD4EE", "#F6C3B2", "#F6EEC3", "#FFD4DD", "#A1DDCC", "#CCEEFF", "#DDE699", "#D4D480"),
)
FREE = "#ECECEC"
MAX_GROUPS = 40  # groups of equal devices that are shown; a plan file has them all
TOLERANCE = 1e-6  # devices, of a bound
MIN_FREE = 10  # ‰ of a device; less is what sevenths leave over


def plan_summary(plan: Plan) -> str:
    """Return devices, scale, cost, bound, what is free and what is unserved, in one line."""
    parts = [show_count(plan.devices_used, "device")]
    parts.append(f"{show_rate(plan.scale)} x the rates" if plan.objective == "rate" else "")
    parts.append("" if plan.cost_per_hour is None else f"{plan.cost_per_hour:.2f} per hour")
    proven = None if plan.provenance is None else plan.provenance.proven
    more = devices_to_serve_all(plan)
    bound = "" if plan.bound is None or more else f"proven bound {plan.bound:.4g}"
    parts.append("proven optimal for evenly spaced requests" if proven == "optimal" else bound)
    free = sum(device.free for device in plan.devices if device.free >= MIN_FREE)
    parts.append(_free(free) if free else "")
    if plan.unserved:
        parts.append(f"{show_rate(sum(plan.unserved.values()))} requests/s unserved")
        searched = proven is None and plan.objective == "devices" and plan.bound is not None and not more
        parts.append("proven: no plan serves all" if proven == "infeasible" else more)
        parts.append("a plan that serves all was not found in the time" if searched else "")
    return ", ".join(part for part in parts if part)


def devices_to_serve_all(plan: Plan) -> str:
    """Say how many devices at least would serve all, where these are proven to be more than the plan has."""
    counted = plan.objective == "devices" and plan.cost_per_hour is None and plan.unserved
    least = 0 if plan.bound is None else math.ceil(plan.bound - TOLERANCE)
    return f"serving all takes {least} devices or more" if counted and least > plan.devices_used else ""


def _free(thousandths: int) -> str:
    if thousandths <= WHOLE:
        return f"{show_share(thousandths)} of a device free"
    return f"{thousandths / WHOLE:.1f} devices free in total"


def more_devices(groups: Sequence[DeviceGroup]) -> str:
    """Return the line for the devices beyond MAX_GROUPS."""
    rest = sum(group.count for group in groups[MAX_GROUPS:])
    return f"… and {rest} more devices"


def truncate(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(letters - 1, 0)] + "…" * (letters > 0)


def spans(device: Device) -> Iterable[tuple[int, int, Partition | None]]:
    """Yield start and end, in ‰, of each partition of a device; None for what is free."""
    start = 0
    for partition in device.partitions:
        yield start, start + partition.share, partition
        start += partition.share
    if WHOLE - start >= MIN_FREE:
        yield start, WHOLE, None


def dominant_model(partition: Partition) -> str:
    """Return the model that takes most of a duty cycle: it gives a partition its colour."""
    return max(partition.placements, key=lambda p: p.latency).model if partition.placements else ""


def model_colours(plan: Plan) -> dict[str, str]:
    names = sorted({placement.model for _, _, placement in plan.placements()})
    return {"": FREE} | {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
