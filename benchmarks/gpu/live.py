"""Stage 4: all models at once, live and simulated, and the largest rate of three planners: `live.json`.

Requests come from the server's own process, in memory shared with its workers: the cost of HTTP is measured elsewhere
(docs/benchmarks.md), and would dominate at these rates.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.gpu import profiles
from benchmarks.gpu.session import Session
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.backends import Backend
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.request import Outcome, Request
from cotenant.core.tensor import Tensor
from cotenant.errors import ConfigError, CotenantError, RequestError, UnavailableError, WorkerError
from cotenant.live.deployment import Deployment, ServableModel
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from cotenant.measure.histogram import Histogram
from cotenant.measure.ledger import OutcomeLedger
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.runtime.dispatcher import HOPELESS, PASSED
from cotenant.runtime.events import LaneSpec
from cotenant.runtime.lane_specs import lane_specs
from cotenant.runtime.log import read_log
from cotenant.sim.run import simulate
from cotenant.sim.service import Key
from cotenant.sim.trace_replay import ObservedBatch, collect_observations, recorded_batches
from cotenant.worker.repository import sample_inputs
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals

TEMPORAL = "squishy"  # time-shares whole devices
PLANNERS = ("geometry", "elastic", TEMPORAL)
LOOSER = (1, 2, 4, 8, 16)  # factors on the SLOs
LOADS = (0.3, 0.6, 0.9)  # of the planned rates, for the comparison
MORE, LESS = (1.0, 1.1, 1.2, 1.3), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # likewise, for the largest rate
COMPARED, STEP = 15.0, 6.0  # seconds of a run
MIN_REQUESTS = 200  # requests; with fewer, sampling noise of a p99 dominates
INPUTS = 8  # different inputs of a model
TIMER = 0.0005  # seconds: requests due within this are sent now
BURST = 32  # requests in a row before responses are read
RESPONSE_TIMEOUT = 30.0  # seconds for the last responses
MIN_SECONDS = 20.0  # seconds that starting workers and one run take at least


def run(session: Session, models: Mapping[str, ServableModel]) -> None:
    path = session.out / "live.json"
    results: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    for place, name in enumerate(session.backends):
        known = profiles.read(session.out / f"profiles-{name}.csv")
        if missing := sorted(models.keys() - known):
            session.lacks(f"{name}: {', '.join(missing)} cannot be planned for without the profiles of stage 2")
        if not models.keys() & known:
            continue
        rest = session.left * (1 - 1 / (len(session.backends) - place))
        # Timers of the server may write to its log until the event loop ends.
        with session.backend(name) as backend, tempfile.TemporaryDirectory() as folder:
            if backend is None:
                continue
            result = results[name] = {}
            with Path(folder, "events.jsonl").open("wb") as log:
                try:
                    uvloop.run(_served(session, name, sorted(models.keys() & known), backend, result, log, rest))
                except CotenantError as error:
                    session.lacks(f"{name}: {error}")
                finally:
                    session.write(path.name, msgspec.json.format(msgspec.json.encode(results), indent=1))


async def _served(
    session: Session,
    name: str,
    models: Sequence[str],
    backend: Backend,
    result: dict[str, Any],
    log: BufferedWriter,
    rest: float,
) -> None:
    """Serve all models and measure. rest: seconds to leave for later backends."""
    builder, deployment = await prepared(session, name, models, backend)
    if deployment.plan.unserved:
        session.lacks(
            f"{name}: {', '.join(deployment.plan.unserved)}: not served, or not in full; no share that serves them"
            " within their targets is left beside the others"
        )
    if not deployment.plan.devices:
        return
    server = Server(deployment, backend, builder.build, log=log)
    await server.start()
    try:
        bench = _LoadedServer(session, server, log)
        if session.left - rest > MIN_SECONDS + len(LOADS) * COMPARED:
            result["agreement"] = await bench.compare(deployment)
            result["batches"] = bench.batches
        else:
            session.lacks(f"{name}: live against simulated: out of time")
        times, temporal = await _smallest_feasible_factor(deployment)
        if not times:
            session.lacks(
                f"{name}: {TEMPORAL}, time-sharing whole devices, meets the SLOs at no rate, even "
                f"{LOOSER[-1]} times longer"
            )
        elif times > 1:
            session.say(
                f"{name}: {TEMPORAL}, time-sharing whole devices, meets the SLOs at no rate; planners are compared at "
                f"{times} x the SLOs, the smallest multiple that it meets, and the others also at the SLOs"
            )
        result["temporal"] = {"targets_times": times}
        for factor in dict.fromkeys((times or 1, 1)):
            looser = _with_looser_slos(deployment, factor)
            found = result["largest" if factor == 1 else "largest_with_looser_targets"] = {}
            for planner in PLANNERS:
                if session.left - rest < MIN_SECONDS:
                    session.lacks(f"{name}: the largest rate under {planner}: out of time")
                elif planner != TEMPORAL or factor == times:
                    known = {TEMPORAL: temporal} | ({deployment.plan.planner: deployment.plan} if factor == 1 else {})
                    if (plan := known.get(planner)) is None:
                        plan = await asyncio.to_thread(plan_problem, looser.problem, planner)
                    found[planner] = await bench.largest(looser, plan, session.left - rest)
            rates = {planner: it["requests_s"] for planner, it in found.items()}
            if rates.get(TEMPORAL):
                over = result["temporal"]["over"] = {planner: rate / rates[TEMPORAL] for planner, rate in rates.items()}
                ratios = ", ".join(f"{planner} {ratio:.2f} x" for planner, ratio in over.items())
                session.say(f"{name}: at {factor} x the SLOs, largest rates over that of {TEMPORAL}: {ratios}")
    finally:
        await server.stop(grace=2.0)


async def _smallest_feasible_factor(deployment: Deployment) -> tuple[int, Plan]:
    """Return the smallest factor on SLOs at which time-shared whole devices meet them, 0 for none, and the plan.

    A short SLO and another model's long batch are incompatible on one device.
    """
    for factor in LOOSER:
        plan = await asyncio.to_thread(plan_problem, _with_looser_slos(deployment, factor).problem, TEMPORAL)
        if plan.devices and not plan.unserved:
            return factor, plan
    return 0, plan


def _with_looser_slos(deployment: Deployment, factor: int) -> Deployment:
    """Return the deployment with all SLOs multiplied."""
    if factor == 1:
        return deployment
    models = {model.name: msgspec.structs.replace(model, slo=factor * model.slo) for model in deployment.problem.models}
    return msgspec.structs.replace(
        deployment,
        offered={
            name: msgspec.structs.replace(
                offer, model=msgspec.structs.replace(offer.model, slo=factor * offer.model.slo)
            )
            for name, offer in deployment.offered.items()
        },
        problem=msgspec.structs.replace(deployment.problem, models=tuple(models.values())),
    )


async def prepared(
    session: Session, name: str, models: Sequence[str], backend: Backend
) -> tuple[DeploymentBuilder, Deployment]:
    """Build the deployment.

    Uses an interference predictor fitted to pairs if there are enough of them, else the default margin.
    """
    given = {"planner": f'"{PLANNERS[0]}"', "profiles": f'"{(session.out / f"profiles-{name}.csv").absolute()}"'}
    pairs = (session.out / f"pairs-{name}.csv").absolute()
    if pairs.exists() and not session.cpu:
        predictor = f'{{ model = "gaussian-process", fit = "{pairs}" }}'
        try:
            builder = DeploymentBuilder(session.settings(name, **given, interference=predictor), backend)
            return builder, await builder.build(models)
        except ConfigError as error:
            session.lacks(f"{name}: interference: {error}")
    builder = DeploymentBuilder(session.settings(name, **given), backend)
    return builder, await builder.build(models)


class _LoadedServer:
    """Put a server under load.

    log: of its events, as it writes them. batches: of a comparison's first run, how long batches of each size took, and
    how long they were planned to take.
    """

    def __init__(self, session: Session, server: Server, log: BufferedWriter) -> None:
        self._session = session
        self._server = server
        self.batches: list[dict[str, Any]] = []
        self._log = log
        rng = np.random.default_rng(0)
        self._inputs = {
            name: [self._placed(sample_inputs(offer.entry, offer.info, 1, rng)) for _ in range(INPUTS)]
            for name, offer in server.deployment.offered.items()
        }

    def _placed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy tensors to memory shared with workers, as a front end would."""
        placed = []
        for tensor in tensors:
            block = self._server.allocate(len(tensor.data))
            if block is not None:
                block.view[:] = tensor.data
                tensor = msgspec.structs.replace(tensor, data=block.view, block=block)
            placed.append(tensor)
        return tuple(placed)

    async def compare(self, deployment: Deployment) -> list[dict[str, Any]]:
        """Run each load live, then simulate it twice.

        Once with profiles and predictor, once with batch times observed under other arrivals.
        """
        problem, plan = deployment.problem, deployment.plan
        models = _served_by(problem, plan)
        lanes = lane_specs(plan, {model.name: model for model in problem.models}, problem.profiles)
        since = time.monotonic()
        await self._run_load(models, plan, LOADS[1], COMPARED / 2, seed=1000)
        observed = collect_observations(read_log(self._written()), since, time.monotonic()).batches
        took = recorded_batches(lanes, observed)
        self.batches = _batches(lanes, observed)
        rows = []
        for load in LOADS:
            live = await self._run_load(models, plan, load, COMPARED, seed=0)
            workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
            foreseen = simulate(plan, problem, workload, seconds=COMPARED)
            as_observed = simulate(plan, problem, workload, seconds=COMPARED, observed=took)
            rows.append(
                {
                    "load": load,
                    **{
                        name: _figures(it)
                        for name, it in (
                            ("live", live),
                            ("simulated", foreseen),
                            ("simulated_as_observed", as_observed),
                        )
                    },
                }
            )
            self._session.say(
                f"{load:g} x the planned rates: {_rate(live):.0f} requests/s, p99 "
                f"{_largest_difference(foreseen, live)} of the simulated; as observed, "
                f"{_largest_difference(as_observed, live)}"
            )
        return rows

    async def largest(self, deployment: Deployment, plan: Plan, seconds: float) -> dict[str, Any]:
        """Find the largest multiple of the planned rates at which every SLO is met live. seconds: time limit."""
        models = _served_by(deployment.problem, plan)
        until = time.monotonic() + seconds
        begun = time.monotonic()
        await self._server.apply(msgspec.structs.replace(deployment, plan=plan))
        changed = time.monotonic() - begun
        sustained, runs = 0.0, []

        async def sustains(load: float) -> bool:
            if time.monotonic() + STEP + 2 > until:
                raise TimeoutError(f"{plan.planner} at {load:g} x the planned rates: out of time")
            report = await self._run_load(models, plan, load, STEP, seed=0)
            late = [row.model for row in report.models if not row.slo_met]
            runs.append({"load": load, "late": late, "lag_s": report.lag, **_figures(report)})
            return not late

        try:
            for load in MORE:
                if not await sustains(load):
                    break
                sustained = load
            for load in LESS if not sustained else ():
                if await sustains(load):
                    sustained = load
                    break
        except TimeoutError as error:
            self._session.lacks(str(error))
        planned = sum(plan.rates().values())
        self._session.say(
            f"{plan.planner}: planned {planned:.0f} requests/s on {plan.devices_used} devices in {plan.solve_s:.1f} s, "
            f"rollout in {changed:.2f} s, sustained {sustained:g} x that"
        )
        return {
            "requests_s": sustained * planned,
            "planned_s": planned,
            "solve_s": plan.solve_s,
            "change_s": changed,
            "plan": msgspec.json.decode(plan.to_json()),
            "runs": runs,
        }

    async def _run_load(self, models: Sequence[Model], plan: Plan, load: float, seconds: float, seed: int) -> Report:
        """Send Poisson arrivals in an open loop."""
        ledgers = {model.name: OutcomeLedger() for model in models}
        workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
        lag, start = Histogram(), time.monotonic()
        sent = pending = burst = 0
        idle = asyncio.Event()

        def send(model: Model) -> None:
            nonlocal pending
            now = time.monotonic()
            request = Request(sent, model.name, now, now + model.slo)
            pending += 1

            def done(answer: InferResponse | RequestError) -> None:
                nonlocal pending
                pending -= 1
                ledgers[model.name].ended((request,), _outcome(answer), time.monotonic())
                if not pending:
                    idle.set()

            inputs = self._inputs[model.name][sent % INPUTS]
            self._server.infer(InferRequest(model=model.name, inputs=inputs), done)

        for times, sources in generate_arrivals(workload, seconds, seed):
            for offset, source in zip(times.tolist(), sources.tolist(), strict=True):
                due = start + offset
                while (wait := due - time.monotonic()) > TIMER or burst >= BURST:
                    burst = 0
                    await asyncio.sleep(max(0.0, wait))
                lag.extend((max(0.0, time.monotonic() - due),))
                send(models[source])
                sent += 1
                burst += 1
        await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
        idle.clear()
        if pending:
            try:
                await asyncio.wait_for(idle.wait(), RESPONSE_TIMEOUT)
            except TimeoutError:
                raise WorkerError(f"{pending} requests have no answer after {RESPONSE_TIMEOUT:g} s") from None
        return Report.of("live", models, ledgers, seconds, lag=lag.quantile(0.99) if sent else None)

    def _written(self) -> list[bytes]:
        self._log.flush()
        return Path(self._log.name).read_bytes().split(b"\n")[:-1]


def _batches(lanes: Sequence[LaneSpec], observed: Mapping[Key, Sequence[ObservedBatch]]) -> list[dict[str, Any]]:
    planned = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
    rows = []
    for (lane, model), ran in observed.items():
        sizes: dict[int, list[float]] = {}
        for batch in ran:
            sizes.setdefault(batch.rows, []).append(batch.seconds * 1e3)
        for size, taken in sorted(sizes.items()):
            p10, p50, p90 = np.quantile(taken, (0.1, 0.5, 0.9)).tolist()
            figures = {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90, "planned_ms": planned[lane, model][size - 1] * 1e3}
            rows.append({"lane": str(lane), "model": model, "rows": size, "batches": len(taken), **figures})
    return rows


def _served_by(problem: Problem, plan: Plan) -> list[Model]:
    return [model for model in problem.models if plan.rate(model.name)]


def _outcome(answer: InferResponse | RequestError) -> Outcome:
    if isinstance(answer, InferResponse):
        return Outcome.SERVED
    if isinstance(answer, UnavailableError):
        return Outcome.EXPIRED if any(reason in str(answer) for reason in (PASSED, HOPELESS)) else Outcome.REJECTED
    return Outcome.FAILED


def _rate(report: Report) -> float:
    return sum(row.offered for row in report.models)


def _figures(report: Report) -> dict[str, Any]:
    return {
        "models": {
            row.model: {
                "requests": sum(row.outcomes.values()),
                "attainment": row.attainment,
                "p50_ms": None if row.p50 is None else row.p50 * 1e3,
                "p99_ms": None if row.p99 is None else row.p99 * 1e3,
                "outcomes": row.outcomes,
            }
            for row in report.models
        }
    }


def _largest_difference(simulated: Report, live: Report) -> str:
    """Describe the largest difference of p99, over models with MIN_REQUESTS requests."""
    seen = {row.model: row for row in live.models if sum(row.outcomes.values()) >= MIN_REQUESTS}
    differences = {
        row.model: seen[row.model].p99 / row.p99 - 1  # type: ignore[operator]
        for row in simulated.models
        if row.p99 and row.model in seen and seen[row.model].p99
    }
    if not differences:
        return "nothing to compare"
    worst = max(differences, key=lambda model: abs(differences[model]))
    return f"within {abs(differences[worst]) * 100:.0f} % ({worst} {differences[worst] * 100:+.0f} %)"
