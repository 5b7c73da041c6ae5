"""Tabulate the differences between two plans."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.core.plan import Partition
from cotenant.core.plan_diff import KEEPS_WORKERS, PartitionChange, PlanDiff, Verb
from cotenant.core.units import show_count, show_rate, show_share
from cotenant.render.table import table

MAX_ROWS = 40
VERBS: dict[Verb, str] = {
    "keep": "kept",
    "tune": "tuned",
    "reload": "larger batch",
    "resize": "resized",
    "refill": "other models",
    "move": "moved",
    "start": "started",
    "stop": "stopped",
}


def plan_diff_table(difference: PlanDiff) -> RenderableType:
    """Tabulate what starts, stops and moves, a row per change however many devices it happens on; then the sums."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for change in difference.changes:
        if change.verb != "keep":
            what, where, before, after = _line(change)
            lines.setdefault((what, before, after), []).append(where)
    rows = table("changes from the plan in force", "change", "where", "before", "after")
    for (what, before, after), places in list(lines.items())[:MAX_ROWS]:
        many = f" and {len(places) - 1} more" if len(places) > 1 else ""
        rows.add_row(what, escape(places[0] + many), escape(before), escape(after))
    parts: list[RenderableType] = [rows] if lines else []
    if len(lines) > MAX_ROWS:
        parts.append(Text(f"… and {len(lines) - MAX_ROWS} more changes; --json has them all", style="dim"))
    return Group(*parts, Text(summary(difference)))


def summary(difference: PlanDiff) -> str:
    """Return the sums in a line or two."""
    if not any(change.verb != "keep" for change in difference.changes):
        return "no change: the new plan equals the plan in force"
    tuned = sum(change.verb == "tune" for change in difference.changes)
    kept = show_count(difference.workers_kept, "worker kept", "workers kept")
    if tuned:
        kept += f" ({tuned} with another rate or a smaller batch)"
    text = f"{kept}, {difference.workers_started} to start, {difference.workers_stopped} to stop"
    for names, word in ((difference.devices_added, "added"), (difference.devices_removed, "removed")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            text += f"; {show_count(len(names), 'device')} {word}: {shown}"
    if difference.rates:
        rates = [f"{model} {show_rate(was)} to {show_rate(will)}/s" for model, (was, will) in difference.rates.items()]
        text += f"\nrates: {', '.join(rates[:8])}" + (f" and {len(rates) - 8} more" if len(rates) > 8 else "")
    return text


def _line(change: PartitionChange) -> tuple[str, str, str, str]:
    before, after = _cells(change.before), _cells(change.after)
    moves = change.verb == "move"
    where = f"{change.origin} to {change.device}" if moves else str(change.device or change.origin)
    if change.verb in KEEPS_WORKERS or change.verb in ("reload",):
        before, after = _batches(change.before), _batches(change.after)
    return VERBS[change.verb], where, before, after


def _cells(partition: Partition | None) -> str:
    if partition is None:
        return "-"
    return f"{show_share(partition.share)} {', '.join(placement.model for placement in partition.placements)}"


def _batches(partition: Partition | None) -> str:
    """Describe batches and rates, where shares and models stay."""
    if partition is None:
        return "-"
    each = (
        f"{placement.model} batch {placement.batch} {show_rate(placement.rate)}/s" for placement in partition.placements
    )
    return f"{show_share(partition.share)} {', '.join(each)}"
