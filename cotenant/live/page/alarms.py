"""Judge what the page shows: how a model fares against its SLO, and what somebody should look at."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cotenant.core.units import show_seconds
from cotenant.live.page.snapshot import Alarm, MachineView, ModelView, PartitionView
from cotenant.live.status import PastRollout

TOLERATED = 5  # times the misses that an SLO allows, from which on it is violated: as docs/examples/alerts.yml pages
CHANCE = 2  # requests that may miss their target of however few, before it is more than a warning
NOTABLE_FOREIGN = 0.25  # part of the processors
NOTABLE_SLOWDOWN = 1.2  # the whole margin of a plan
RECENT_ROLLOUT = 600.0  # seconds for which a rollout that failed is told


def health(attainment: float | None, stayed: int, objective: float) -> str:
    """Judge a fraction of so many requests within their target against the fraction that is asked for."""
    if attainment is None:
        return "idle"
    if attainment >= objective:
        return "good"
    mild = attainment >= 1 - TOLERATED * (1 - objective) or round(stayed * (1 - attainment)) <= CHANCE
    return "warn" if mild else "bad"


def alarms(
    state: str,
    models: Iterable[ModelView],
    partitions: Iterable[PartitionView],
    machine: MachineView,
    last: PastRollout | None,
    short: str,
    reload_error: str,
    file_errors: Iterable[str],
) -> list[Alarm]:
    """Return what somebody should look at, the worst first. last: the rollout that ended last. short: see
    `ControllerStatus`. reload_error, file_errors: see `Snapshot`."""
    found = [Alarm("bad", "server", "The server takes no requests: it stops.")] if state == "stopping" else []
    found += [alarm for model in models if (alarm := _about_model(model, state)) is not None]
    found += [alarm for each in partitions if (alarm := _about_partition(each)) is not None]
    if reload_error:
        found.append(Alarm("warn", "plan", _sentence(reload_error)))
    found += [Alarm("warn", "server", _sentence(error)) for error in file_errors]
    if short:
        found.append(Alarm("warn", "plan", _sentence(short)))
    if machine.foreign is not None and machine.foreign >= NOTABLE_FOREIGN * machine.processors:
        text = f"Other programs use {machine.foreign:.1f} of {machine.processors} processors."
        found.append(Alarm("warn", "machine", text))
    if machine.slowdown is not None and machine.slowdown >= NOTABLE_SLOWDOWN:
        found.append(Alarm("warn", "slowdown", f"Batches take {machine.slowdown:.2g} × as long as predicted."))
    if last is not None and last.failed and last.seconds_ago < RECENT_ROLLOUT:
        text = f"Revision {last.revision} ({last.reason}) was {last.outcome}{_because(last.failure)}."
        found.append(Alarm("warn", "plan", text))
    return sorted(found, key=lambda alarm: alarm.level)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _about_model(model: ModelView, state: str) -> Alarm | None:
    about = f"model-{model.name}"
    if model.health in ("bad", "warn") and model.attainment is not None and model.objective and model.slo:
        return Alarm(model.health, about, _missed(model, model.attainment, model.objective, model.slo))
    if model.health == "off" and state == "serving" and model.reason != "unloaded":
        return Alarm("bad", about, f"{model.name} is not served{_because(model.reason)}.")
    if model.state == "READY" and model.reason:
        return Alarm("warn", about, f"{model.name} is {model.reason}.")
    return None


def _about_partition(each: PartitionView) -> Alarm | None:
    about, name = f"partition-{each.device}-{each.partition}", f"Partition {each.partition} of {each.device}"
    if each.state not in ("ready", "starting"):
        return Alarm("bad", about, f"{name} is {each.state}{_because(each.reason)}.")
    return Alarm("warn", about, f"{name} uses more than its share.") if each.over_share else None


def _missed(model: ModelView, attainment: float, objective: float, slo: float) -> str:
    # As the page's own script has it, which never rounds up: a missed SLO of 99 % reads as one.
    percent = math.floor(attainment * 1000 + 1e-5) / 10
    met = f"{percent:g} % within {show_seconds(slo)} in the last minute; {objective * 100:.5g} % is its SLO."
    why = f" {model.refused:.3g} requests/s rejected: {model.why}." if model.why else ""
    return f"{model.name}: {met}{why}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
