"""How fast does a server follow when its load, or what other programs leave it, changes at once?

`python -m benchmarks.step [--seconds S] [--models NAME …] [--tight] [--no-adapt] [--own-sessions] [--json]`

Example models are served on shares of the processor. The rate of the model with the most load doubles, within 70 % of
capacity, which the first plan knows nothing of; then other programs take one core, then two; then they end. Each of
these five phases lasts `--seconds`. Reported for each: attainment in its first 10 seconds and after them, of all
requests and of those that were not rejected on arrival, and when a plan was asked for and a new one in force.
`--no-adapt`: the same with the first plan throughout. `--own-sessions`: each of the other programs in a session of its
own, as those of other terminals and users are; without it Linux divides the processors among all processes alike, so
that a server gets the more of them, the more of its own want to run.

The first plan often has room for the doubled rate, by other batches or by what its partitions lend each other.
`--tight` begins with a plan that has none: shares are not lent, and that model has a partition of its own, with the
smallest share that keeps its SLO at half its rate and the headroom that every plan of the controller has. Its rate
doubles, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop

from benchmarks.adaptive import Segment, Served, Tick, arguments, attainment, foreign_programs, sending, served
from benchmarks.harness import show_result
from benchmarks.rollouts import fixed_planner
from cotenant.control.controller_options import ControllerOptions
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast import attains
from cotenant.planners.local_search import rebatched_plan
from cotenant.planners.rates import at_rates, rescaled_plan
from cotenant.planning.front_end import plan_with_front_end

SETTLED = 10.0  # seconds after the beginning of a phase


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """attainment: in the first `SETTLED` seconds, and from then on; accepted: of requests that were not rejected on
    arrival. plans: that came into force within it. asked_s, in_force_s: seconds until the first was asked for, and
    until the first was in force; None where there was none. short: the controller's last word of what is short."""

    name: str
    attainment_first: float
    attainment_later: float
    accepted_first: float
    accepted_later: float
    plans: int
    asked_s: float | None
    in_force_s: float | None
    short: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """doubled: the model whose rate doubles, to so many requests/s. decisions: of the controller, the latest, with
    seconds from the beginning."""

    adapt: bool
    doubled: str
    rate: float
    decisions: list[tuple[float, str]]
    phases: tuple[Phase, ...]
    load_average: float


PHASES = (("planned rates", 0), ("a rate doubled", 0), ("one core taken", 1), ("two cores taken", 2), ("cores back", 0))


async def measure(
    repository: Path,
    names: list[str],
    seconds: float,
    seed: int,
    *,
    tight: bool,
    adapt: bool,
    own_sessions: bool,
    event_log: Path | None,
) -> Result:
    phases = PHASES[:2] if tight else PHASES
    async with served(
        repository, names, adapt=adapt, event_log=event_log, planned_for=_halved, lend=not tight
    ) as given:
        full = at_rates(given.problem, given.rates)
        half, doubled = _halved(full), heaviest(full)
        if tight:
            await _make_tight(given, half, full)
        segments = [Segment(seconds, half), Segment(seconds * (len(phases) - 1), given.rates)]
        ticks: list[Tick] = []
        shorts: list[tuple[float, str]] = []
        begun: list[float] = []

        async def watch() -> None:
            while True:
                status = await given.server.status()
                if status.adaptation is not None:
                    shorts.append((time.monotonic() - begun[0], status.adaptation.short))
                await asyncio.sleep(0.2)

        async def disturb() -> None:
            with ExitStack() as taken:
                for number, (_, cores) in enumerate(phases):
                    await asyncio.sleep(max(0.0, number * seconds - (time.monotonic() - begun[0])))
                    taken.close()
                    taken.enter_context(foreign_programs(cores, own_session=own_sessions))
                await asyncio.sleep(seconds)

        tasks: list[asyncio.Task[None]] = []
        async for tick in sending(given.address, segments, seed):
            if not begun:
                begun.append(time.monotonic() - tick.seconds)
                tasks = [asyncio.create_task(watch()), asyncio.create_task(disturb())]
            ticks.append(tick)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        adaptation, now = (await given.server.status()).adaptation, time.monotonic() - begun[0]
        decided = [] if adaptation is None else [(now - it.seconds_ago, it.action) for it in adaptation.decisions]
    return Result(
        adapt=adapt,
        doubled=doubled,
        rate=given.rates[doubled],
        decisions=sorted(decided),
        phases=tuple(
            _phase(name, number * seconds, (number + 1) * seconds, ticks, decided, shorts)
            for number, (name, _) in enumerate(phases)
        ),
        load_average=os.getloadavg()[0],
    )


def _phase(
    name: str,
    begin: float,
    end: float,
    ticks: list[Tick],
    decided: list[tuple[float, str]],
    shorts: list[tuple[float, str]],
) -> Phase:
    asked, in_force = (
        [at - begin for at, action in decided if begin <= at < end and action.startswith(word)]
        for word in ("plan again", "in force")
    )
    return Phase(
        name=name,
        attainment_first=attainment(ticks, begin, begin + SETTLED),
        attainment_later=attainment(ticks, begin + SETTLED, end),
        accepted_first=attainment(ticks, begin, begin + SETTLED, accepted=True),
        accepted_later=attainment(ticks, begin + SETTLED, end, accepted=True),
        plans=len(in_force),
        asked_s=min(asked, default=None),
        in_force_s=min(in_force, default=None),
        short=next((short for at, short in reversed(shorts) if at < end), ""),
    )


def heaviest(problem: Problem) -> str:
    """Return the model that takes most of the processors' time."""
    (kind,) = problem.fleet
    return max(
        problem.rates, key=lambda name: problem.rates[name] * problem.profiles[name, kind.name].latency(1, WHOLE)
    )


def _halved(problem: Problem) -> dict[str, float]:
    """Return the rates, that of the heaviest model halved."""
    name = heaviest(problem)
    return problem.rates | {name: problem.rates[name] / 2}


async def _make_tight(given: Served, half: dict[str, float], full: Problem) -> None:
    """Put the tightest plan for these rates into force. Exits where other batches would serve the full rate."""
    headroom = ControllerOptions().headroom
    planned = at_rates(full, {name: headroom * rate for name, rate in half.items()})
    plan, twice = tightest(planned, heaviest(full)), without_applications(full, {})
    other = rebatched_plan(rescaled_plan(plan, twice), twice)
    if other is not None and attains(other, twice):
        sys.exit("the least share of this machine serves the doubled rate, too; give --models that take longer")
    deployment = given.server._server.deployment
    await given.server._server.apply(msgspec.structs.replace(deployment, problem=planned, plan=plan, slowdowns={}))


def tightest(problem: Problem, name: str) -> Plan:
    """Return the plan with the smallest partition for one model, all others beside it, that keeps every SLO. Exits
    where there is none."""
    (kind,) = problem.fleet
    assert problem.front_end is not None
    others = tuple(sorted(problem.rates.keys() - {name}))
    for share in kind.cuts:
        layout = ((WHOLE - share, others), (share, (name,)))
        plan = plan_with_front_end(fixed_planner(layout, full=True), problem, problem.front_end)
        if not plan.unserved and attains(plan, problem):
            return plan
    sys.exit(f"no share of this machine keeps the SLOs of {name} and of {', '.join(others)} apart")


def main() -> None:
    parser = arguments(__doc__, 30.0)
    parser.add_argument("--tight", action="store_true")
    parser.add_argument("--no-adapt", action="store_true")
    parser.add_argument("--own-sessions", action="store_true")
    args = parser.parse_args()
    result = uvloop.run(
        measure(
            args.model_repository,
            args.models,
            args.seconds,
            args.seed,
            tight=args.tight,
            adapt=not args.no_adapt,
            own_sessions=args.own_sessions,
            event_log=args.event_log,
        )
    )
    show_result(
        result,
        f"the rate of {result.doubled} doubles to {result.rate:.0f}/s",
        *map(_line, result.phases),
        f"{'adapting' if result.adapt else 'one plan throughout'}; load average {result.load_average:.1f}",
    )


def _line(phase: Phase) -> str:
    plans = "none asked for" if phase.asked_s is None else f"first asked for after {phase.asked_s:.2f} s"
    if phase.in_force_s is not None:
        plans += f", in force after {phase.in_force_s:.2f} s"
    return (
        f"{phase.name:16} {phase.attainment_first * 100:6.2f} % in the first {SETTLED:g} s, "
        f"{phase.attainment_later * 100:6.2f} % later; of accepted requests {phase.accepted_first * 100:6.2f} and "
        f"{phase.accepted_later * 100:6.2f} %; {phase.plans} new plans, {plans}"
        f"{'; ' + phase.short if phase.short else ''}"
    )


if __name__ == "__main__":
    main()
