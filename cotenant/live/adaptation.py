"""Adapt a server to what is asked of it: the controller, its driver, its solver, and what people see of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from cotenant.backends import Backend
from cotenant.backends.local_provider import LocalProvider
from cotenant.control.adaptation import ControllerCommand, ControllerEvent
from cotenant.control.controller_built import ControllerBuilt
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.event_log import controller_line, header_line
from cotenant.core.plan import Plan
from cotenant.live.adaptation_driver import AdaptationDriver, Solver, planned_rates
from cotenant.live.driver import Driver
from cotenant.live.event_log import EventLog
from cotenant.live.foreign_load import ForeignLoad, available_cores
from cotenant.live.metrics import AdaptationReading
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.live.status import AdaptationStatus, DecisionStatus, DurationSummary
from cotenant.planners import Problem


class Learnt(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has learnt. rates, slowdowns: by model, that the plan in force counts with; see `Adopted`."""

    plan: Plan
    rates: dict[str, float]
    slowdowns: dict[str, float]


class AdaptationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a server adapts. solver: makes what plans anew, once the server is up. controller: how quickly it follows.
    corrections: of profiles, which those to come join."""

    solver: Callable[[], Solver]
    controller: ControllerOptions = ControllerOptions()
    corrections: ProfileCorrections = msgspec.field(default_factory=ProfileCorrections)


class Adaptation:
    """Compose what adapts a server. It begins with `start`, once the first deployment is in force."""

    def __init__(
        self,
        options: AdaptationOptions,
        state: ServingState,
        driver: Driver,
        observer: ServingObserver,
        rollouts: RolloutDriver,
        backend: Backend,
        log: EventLog | None,
    ) -> None:
        self._options = options
        self._state = state
        self._driver = driver
        self._observer = observer
        self._rollouts = rollouts
        self._backend = backend
        self._log = log
        self._foreign_load = ForeignLoad(available_cores())
        self._adapting: AdaptationDriver | None = None
        self._solver: Solver | None = None

    def start(self, learnt: Learnt | None = None) -> None:
        """Begin with the deployment in force. learnt: what its plan counts with, where that is known from before."""
        _, deployment = self._rollouts.desired
        provider = LocalProvider(self._backend, self._in_force)
        built = ControllerBuilt.of(deployment.problem, deployment.plan, self._options.controller, provider.offers())
        if self._log is not None:
            self._log.write(header_line(built))
        self._solver = self._options.solver()
        self._adapting = AdaptationDriver(
            built.controller(),
            self._solver,
            self._state,
            self._driver,
            self._observer,
            self._rollouts,
            provider,
            foreign_load=self._foreign_load,
            log=self._write,
            corrections=self._options.corrections,
        )
        self._adapting.start(planned_rates(deployment.problem) if learnt is None else learnt.rates)

    def _in_force(self) -> tuple[Problem, Plan]:
        """Return the problem and the plan in force as the controller knows them. It hears of others once the lanes
        before them have drained, and would take a device that they leave out for one that its plan has lost."""
        deployment = self._state.deployment if self._adapting is None else self._adapting.known
        return deployment.problem, deployment.plan

    def _write(self, now: float, event: ControllerEvent, commands: list[ControllerCommand]) -> None:
        if self._log is not None:
            self._log.write(controller_line(now, event, commands))

    async def stop(self) -> None:
        """Decide nothing any more, and end the solver. Rollouts under way go on."""
        if self._adapting is not None:
            await self._adapting.stop()
        if self._solver is not None:
            await self._solver.close()
            self._solver = None

    def learnt(self) -> Learnt | None:
        """Return what is worth keeping over a restart; None before the start."""
        if self._adapting is None:
            return None
        models = self._adapting.controller.status().models
        return Learnt(
            plan=self._state.deployment.plan,
            rates={name: model.planned for name, model in models.items() if model.planned},
            slowdowns={name: model.slowdown for name, model in models.items() if model.slowdown > 1.0},
        )

    def reading(self) -> AdaptationReading | None:
        """Return what the metrics show; None before the start."""
        if self._adapting is None:
            return None
        seen, statistics = self._adapting.controller.status(), self._adapting.statistics
        return AdaptationReading(
            models=seen.models,
            foreign_load=seen.foreign_load,
            short=bool(seen.short),
            replans={(str(cause), step): count for (cause, step), count in statistics.replans.items()},
            late=statistics.late,
            handling=statistics.handling,
            solving=statistics.solving,
            rollouts=statistics.rollouts,
        )

    def status(self) -> AdaptationStatus | None:
        """Return what the controller knows and does; None before the start."""
        if self._adapting is None:
            return None
        now, seen = time.monotonic(), self._adapting.controller.status()
        return AdaptationStatus(
            activity=seen.activity,
            reason=seen.reason,
            short=seen.short,
            foreign_load=seen.foreign_load,
            processors=self._foreign_load.processors,
            observed_slowdown=seen.observed_slowdown,
            models=seen.models,
            corrections=self._options.corrections.of(self._state.deployment.problem),
            refinement=self._state.refinement,
            deciding=DurationSummary.of(self._adapting.statistics.deciding),
            decisions=tuple(
                DecisionStatus(seconds_ago=now - each.time, action=each.action, reason=each.reason)
                for each in reversed(seen.decisions)
            ),
        )
