"""Parse and run what-if scenarios: changes to a problem, written as ``rate=2`` or ``devices=v100:-1``.

| change | means |
|---|---|
| ``rate=2``, ``rate=resnet50:2`` | multiply the requests, of all models or of one |
| ``devices=3``, ``devices=v100:-1``, ``devices=+2`` | at most so many devices, or so many more or fewer than are used |
| ``kind=v100:t4`` | replace each device of the first kind by one of the second |
| ``slo=resnet50:50ms``, ``slo=100ms`` | set the target, of one model or of all |
| ``planner=elastic`` | plan with another planner |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from cotenant.core.application import Application
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.units import parse_seconds
from cotenant.errors import ConfigError
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem, load_planner
from cotenant.planning.pipeline import plan as plan_problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.sim.recorder import Recorder, lane_places
from cotenant.sim.run import simulate
from cotenant.workload import Workload

SPELLINGS = "rate=2, devices=-1, kind=v100:t4, slo=resnet50:50ms, planner=elastic"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what to plan and simulate: planner, problem and workload. lend: idle share of processors."""

    planner: str
    problem: Problem
    workload: Workload
    lend: bool = False


class ScenarioChange(msgspec.Struct, frozen=True):
    """Describe one change, such as ``rate=resnet50:2``: key ``rate``, name ``resnet50``, value ``2``. name: empty for
    all."""

    key: str
    name: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.key}={self.name}{':' if self.name else ''}{self.value}"


def read_change(text: str) -> tuple[ScenarioChange, ...]:
    """Parse changes that are made together, separated by commas. Raises ConfigError."""
    return tuple(_change(part.strip()) for part in text.split(","))


def apply_changes(question: Scenario, changes: Sequence[ScenarioChange], plan: Plan) -> Scenario:
    """Return the scenario with these changes, one after the other. plan: the plan without them.

    Raises ConfigError for a model, a kind or a planner that does not exist.
    """
    used = Counter(device.kind for device in plan.devices)
    for change in changes:
        question = _MAKES[change.key](question, change, used)
    return question


def planned_rates(problem: Problem, plan: Plan) -> dict[str, float]:
    """Return the requests/s, by name, that a plan was made for: the problem's rates, even where some are unserved, or,
    with the objective "rate", the multiple of them that it serves."""
    if problem.objective == "devices":
        return dict(problem.rates)
    if plan.scale > 0:
        return {name: rate * plan.scale for name, rate in problem.rates.items()}
    return {name: plan.rate(name) for name in problem.rates}


class ScenarioTask(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a scenario to plan for and to simulate. plan: the plan, where it exists already."""

    label: str
    question: Scenario
    plan: Plan | None = None
    seconds: float
    seed: int


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of a scenario. kinds: devices used, by kind. utilisation: the fraction of them on which batches
    ran."""

    label: str
    plan: Plan
    report: Report
    utilisation: float

    @property
    def kinds(self) -> dict[str, int]:
        return dict(sorted(Counter(device.kind for device in self.plan.devices).items()))

    @property
    def broken(self) -> list[ModelReport]:
        """Return the models whose SLO was violated, the worst first."""
        broken = [row for row in self.report.models if not row.slo_met]
        return sorted(broken, key=lambda row: (row.attainment or 0.0) - row.required)


def run_scenario(trial: ScenarioTask) -> ScenarioResult:
    """Plan, unless a plan is given, and simulate."""
    question = trial.question
    plan = trial.plan or plan_problem(question.problem, question.planner)
    problem = question.problem
    names = [model.name for model in problem.models]
    slots = lane_places(plan, problem.fleet)
    recorder = Recorder(Dispatcher().handle, names, slots, seconds=trial.seconds, intervals=1)
    report = simulate(
        plan,
        problem,
        question.workload,
        seconds=trial.seconds,
        seed=trial.seed,
        lend=question.lend,
        handle=recorder,
    )
    utilisation = recorder.timeline().utilisation
    return ScenarioResult(label=trial.label, plan=plan, report=report, utilisation=utilisation)


Promise = TypeVar("Promise", Model, Application)


def _change(text: str) -> ScenarioChange:
    key, equals, rest = text.partition("=")
    if not equals or not rest:
        raise ConfigError(f"--what-if {text}: write what changes and how, such as {SPELLINGS}")
    if key not in _MAKES:
        raise ConfigError(
            f"--what-if {text}: {key!r} cannot be changed; available: {', '.join(_MAKES)}, as in {SPELLINGS}"
        )
    name, _, value = rest.rpartition(":")
    change = ScenarioChange(key, name, value)
    if key == "kind" and not (name and value):
        raise ConfigError(f"--what-if {text}: write kind=OLD:NEW, such as kind=v100:t4")
    if key == "rate":
        _factor(change)
    if key == "devices":
        _count(change)
    if key == "slo":
        parse_seconds(value, f"--what-if {text}")
    if key == "planner":
        load_planner(value)
    return change


def _factor(change: ScenarioChange) -> float:
    try:
        factor = float(change.value)
    except ValueError:
        factor = -1.0
    if not 0 <= factor < math.inf:
        raise ConfigError(
            f"{change.text}: {change.value!r} is not a multiple of a rate; write a number such as 2 or 0.5"
        )
    return factor


def _count(change: ScenarioChange) -> int:
    try:
        return int(change.value)
    except ValueError:
        raise ConfigError(
            f"{change.text}: {change.value!r} is not a number of devices; write 3, or -1 and +2 for fewer and more"
        ) from None


def _rate(question: Scenario, change: ScenarioChange, used: Mapping[str, int]) -> Scenario:
    factor, problem, workload = _factor(change), question.problem, question.workload
    if not change.name:
        rates = {name: rate * factor for name, rate in problem.rates.items()}
        return msgspec.structs.replace(
            question,
            problem=msgspec.structs.replace(problem, rates=rates),
            workload=workload.scaled(factor),
        )
    _known(change, "model", [*problem.rates, *workload.sources])
    name = change.name
    rates = {other: rate * (factor if other == name else 1.0) for other, rate in problem.rates.items()}
    sources = {other: source.scaled(factor) if other == name else source for other, source in workload.sources.items()}
    return msgspec.structs.replace(
        question,
        problem=msgspec.structs.replace(problem, rates=rates),
        workload=msgspec.structs.replace(workload, sources=sources),
    )


def _devices(question: Scenario, change: ScenarioChange, used: Mapping[str, int]) -> Scenario:
    problem = question.problem
    kinds = [kind.name for kind in problem.fleet]
    name = change.name
    if not name and len(kinds) > 1:
        raise ConfigError(f"{change.text}: say of which kind, such as devices={kinds[0]}:{change.value}")
    name = name or kinds[0]
    _known(change, "kind", kinds, name)
    count = _count(change)
    if change.value[0] in "+-":
        count += used.get(name, 0)
    if count < 0:
        raise ConfigError(f"{change.text}: only {used.get(name, 0)} of kind {name!r} are used")

    def replaced(kind: Kind) -> Kind:
        return msgspec.structs.replace(kind, count=count) if kind.name == name else kind

    return _with_fleet(question, [replaced(kind) for kind in problem.fleet])


def _kind(question: Scenario, change: ScenarioChange, used: Mapping[str, int]) -> Scenario:
    fleet = {kind.name: kind for kind in question.problem.fleet}
    for name in (change.name, change.value):
        if name not in fleet:
            raise ConfigError(
                f"{change.text}: no devices of kind {name!r} in this problem, which has {', '.join(fleet)}; list it "
                f"under [[devices]], with count = 0 where there are none yet"
            )
    old, new = fleet[change.name], fleet[change.value]
    count = None if old.count is None or new.count is None else old.count + new.count
    fleet[new.name] = msgspec.structs.replace(new, count=count)
    del fleet[old.name]
    return _with_fleet(question, list(fleet.values()))


def _slo(question: Scenario, change: ScenarioChange, used: Mapping[str, int]) -> Scenario:
    problem = question.problem
    if change.name:
        _known(
            change, "model", [*(each.name for each in problem.models), *(each.name for each in problem.applications)]
        )
    slo = parse_seconds(change.value, change.text)

    def replaced(promise: Promise) -> Promise:
        return msgspec.structs.replace(promise, slo=slo) if change.name in ("", promise.name) else promise

    models = tuple(replaced(model) for model in problem.models)
    applications = tuple(replaced(application) for application in problem.applications)
    problem = msgspec.structs.replace(problem, models=models, applications=applications)
    return msgspec.structs.replace(question, problem=problem)


def _planner(question: Scenario, change: ScenarioChange, used: Mapping[str, int]) -> Scenario:
    return msgspec.structs.replace(question, planner=change.value)


def _with_fleet(question: Scenario, fleet: Sequence[Kind]) -> Scenario:
    return msgspec.structs.replace(question, problem=msgspec.structs.replace(question.problem, fleet=tuple(fleet)))


def _known(change: ScenarioChange, what: str, names: Sequence[str], name: str = "") -> None:
    name = name or change.name
    if name not in names:
        raise ConfigError(f"{change.text}: no {what} {name!r}; available: {', '.join(dict.fromkeys(names))}")


_MAKES: dict[str, Callable[[Scenario, ScenarioChange, Mapping[str, int]], Scenario]] = {
    "rate": _rate,
    "devices": _devices,
    "kind": _kind,
    "slo": _slo,
    "planner": _planner,
}
