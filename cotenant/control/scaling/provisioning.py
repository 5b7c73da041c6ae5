"""Decide which instances to provision and which to release, by HetSev's policies: from rates and instances to requests.

An instance has a name, so that a request that is sent twice is carried out once, and each step is told all instances
anew. Only rates are remembered, for as long as the policy looks back: after a restart it scales out as ever, and scales
in a cool-down later.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from cotenant.control.scaling.context import Observation, ScalingContext
from cotenant.control.scaling.hetsev import instance_capacity
from cotenant.core.identity import DeviceId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem

MAX_RATE = 1e9  # requests/s of a model; more is no rate, and not known
MAX_ADDED = 50  # instances of a model and kind at once; if that many find room, more follow in the next step
MAX_NAME = 63  # of a host in DNS, which is named after its pod

# pending: on its way. ready: serves. stuck: has no room, or does not start, for now. ended: will never serve. leaving:
# was released, and has its name until it is gone.
InstanceState = Literal["pending", "ready", "stuck", "ended", "leaving"]


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of a model on a kind of device. reason: why it does not serve; "" where it does, or is on its way."""

    name: str
    model: str
    kind: str
    state: InstanceState
    reason: str = ""


class Provision(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for an instance. slo: in seconds; rate: requests/s that it has to carry within it."""

    name: str
    model: str
    kind: str
    slo: float
    rate: float


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for an instance to go."""

    name: str


class InstancePolicy(Protocol):
    """Say how many instances of each model are wanted, by kind. share: ‰ of a device that one has. horizon: seconds of
    history that it needs."""

    @property
    def share(self) -> int: ...

    @property
    def horizon(self) -> float: ...

    def wanted_instances(self, context: ScalingContext) -> dict[str, Counter[str]]: ...


class InstanceScaler:
    """Decide at intervals. problem: models with objectives and initial rates, kinds with prices and counts, profiles.
    launch_seconds: by kind, until an instance is ready.

    An instance carries what its share sustains within the objective, as everywhere here: a request waits for the batch
    before its own, so that two batches have to fit. HetSev's constraint 4 leaves the wait out.
    """

    def __init__(
        self, problem: Problem, policy: InstancePolicy, launch_seconds: Mapping[str, float] | None = None
    ) -> None:
        self._models = problem.models
        self._first_rates = problem.rates
        self._policy = policy
        self._launch_seconds = dict(launch_seconds or {})
        self._history: dict[str, tuple[Observation, ...]] = {}
        halved = tuple(msgspec.structs.replace(model, slo=model.slo / 2) for model in problem.models)
        self._problem = msgspec.structs.replace(problem, models=halved)

    def capacity(self, model: str, kind: str) -> float:
        """Return the requests/s that an instance carries; 0 where none meets the objective."""
        return instance_capacity(self._problem, model, kind, self._policy.share)

    def step(
        self, now: float, interval: float, rates: Mapping[str, float], instances: Sequence[Instance]
    ) -> list[Provision | Release]:
        """Return what to ask for. interval: seconds that an observation without one before it stands for. rates:
        requests/s by model; of a model that is missing it is not known, so its instances stay as they are. One without
        any that serve, or may, begins with those that the problem's rate takes.

        The last instance of a model stays: without one nothing would tell of its requests.
        """
        kinds = {kind.name for kind in self._problem.fleet}
        known = [each for each in instances if each.kind in kinds]
        requests: list[Provision | Release] = [Release(name=each.name) for each in known if each.state == "ended"]
        counts = Counter((each.kind, each.model) for each in known if each.state in ("pending", "ready"))
        names = {each.name for each in instances}
        for model in self._models:
            own = [each for each in known if each.model == model.name and each.state not in ("ended", "leaving")]
            rate = self._observe(model.name, now, interval, rates)
            if rate is None:
                if any(each.state != "stuck" for each in own) or not self._first_rates.get(model.name):
                    continue
                rate = self._first_rates[model.name]
            wanted = self._wanted(model, now, rate, counts, own)
            added = {kind: n - counts[kind, model.name] for kind, n in wanted.items() if n > counts[kind, model.name]}
            for kind, count in added.items():
                requests += self._provisions(model, kind, count, names)
            if not added:
                fewer = {kind: counts[kind, model.name] - n for kind, n in wanted.items()}
                others = [each for each in own if each.state != "stuck"]
                freely = self._wanted(model, now, rate, counts, others) if len(others) < len(own) else wanted
                # Without those that are stuck it would ask for more: they would go, and come again, without end.
                missed = any(n > counts[kind, model.name] for kind, n in freely.items())
                released = _released(others if missed else own, {kind: n for kind, n in fewer.items() if n > 0})
                requests += [Release(name=each.name) for each in released]
            counts.update({(kind, model.name): min(n, MAX_ADDED) for kind, n in added.items()})
        return requests

    def _observe(self, model: str, now: float, interval: float, rates: Mapping[str, float]) -> float | None:
        rate = rates.get(model)
        if rate is None or not 0 <= rate <= MAX_RATE:
            self._history.pop(model, None)  # what was in between is not known either
            return None
        before = self._history.get(model, ())
        seconds = now - before[-1].time if before else interval
        seen = Observation(time=now, seconds=seconds, rates={model: rate})
        kept = tuple(each for each in before if each.time > now - self._policy.horizon)
        self._history[model] = (*kept, seen)
        return rate

    def _wanted(
        self, model: Model, now: float, rate: float, counts: Counter[tuple[str, str]], own: Sequence[Instance]
    ) -> dict[str, int]:
        """Return how many instances of a model are wanted, by kind. On kinds on which one is stuck there are no more
        than there are."""
        share = self._policy.share
        stuck = {each.kind for each in own if each.state == "stuck"}
        fleet = []
        for kind in self._problem.fleet:
            total = sum(n for (name, _), n in counts.items() if name == kind.name)
            fleet.append(msgspec.structs.replace(kind, count=total * share // WHOLE) if kind.name in stuck else kind)
        problem = msgspec.structs.replace(
            self._problem,
            models=tuple(each for each in self._problem.models if each.name == model.name),
            rates={model.name: rate},
            applications=(),
            fleet=tuple(fleet),
        )
        context = ScalingContext(
            now=now,
            problem=problem,
            plan=_plan(counts, share),
            ready={},
            launch_seconds=self._launch_seconds,
            history=self._history.get(model.name, ()),
        )
        wanted = self._policy.wanted_instances(context)
        return {kind: of_models[model.name] for kind, of_models in wanted.items()}

    def _provisions(self, model: Model, kind: str, count: int, names: set[str]) -> list[Provision | Release]:
        """Return requests for instances with the first names that are free, which are taken from then on."""
        made: list[Provision | Release] = []
        rate = math.floor(1000 * self.capacity(model.name, kind)) / 1000  # as many digits as a pod is annotated with
        for number in itertools.count():
            if len(made) == min(count, MAX_ADDED):
                break
            name = instance_name(model.name, kind, number)
            if name not in names:
                names.add(name)
                made.append(Provision(name=name, model=model.name, kind=kind, slo=model.slo, rate=rate))
        return made


def instance_name(model: str, kind: str, number: int) -> str:
    """Return the name of an instance: what DNS takes of its model and kind, told apart where that is not all."""
    text = re.sub(r"[^a-z0-9]+", "-", f"{model}-{kind}".lower()).strip("-")
    ending = f"-{number}"
    if text != f"{model}-{kind}" or len(text) + len(ending) > MAX_NAME:
        digest = hashlib.sha256(f"{model} {kind}".encode()).hexdigest()
        ending = f"-{digest[:8]}{ending}"
    return text[: MAX_NAME - len(ending)].strip("-") + ending if text else f"instance{ending}"


def _plan(counts: Counter[tuple[str, str]], share: int) -> Plan:
    """Return instances as a plan, of which the policies count them: each on a device of its own."""
    numbers: Counter[str] = Counter()
    devices = []
    for (kind, model), count in sorted(counts.items()):
        placement = Placement(model=model, batch=1, rate=0.0, duty=0.0, latency=0.0)
        for _ in range(count):
            partition = Partition(share=share, placements=(placement,))
            devices.append(Device(id=DeviceId(kind, numbers[kind]), partitions=(partition,)))
            numbers[kind] += 1
    return Plan(planner="hetsev", devices=tuple(devices))


def _released(own: Collection[Instance], fewer: Mapping[str, int]) -> list[Instance]:
    """Return the instances of a model that go. fewer: how many, by kind.

    Those that are stuck all go, whatever their kind: they are given only where others carry the rate. Those that serve
    go only while nothing is on its way: what is to take over has to be there.
    """
    stuck = [each for each in own if each.state == "stuck"]
    ready = [each for each in own if each.state == "ready"]
    pending = [each for each in own if each.state == "pending"]
    if not ready and not pending:
        return []
    released = []
    for kind, count in fewer.items():
        ours = [each for each in reversed(pending) if each.kind == kind]
        if not pending:
            ours = [each for each in reversed(ready) if each.kind == kind]
        released += ours[:count]
    spared = len(ready) + len(pending) - len(released)
    return stuck + (released if spared else released[:-1])
