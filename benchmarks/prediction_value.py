"""Compare latencies predicted offline with those of the live server, for the demo's models and plan.

Interference is predicted by the Gaussian process, fitted to co-located measurements.

    cotenant profile -r models -o profiles.csv --pairs pairs.csv
    python -m benchmarks.prediction_value pairs.csv profiles.csv [--load 0.6 0.9] [--seconds 80] [--repository models]
    [--json]

Each p99 is predicted by the forecast's formula, by the simulator of the same problem, and by the simulator with median
slowdowns instead of the 0.9 quantile that plans use. Target: within 10 % for every model with at least 200 requests.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from benchmarks.live_vs_simulated import settings
from cotenant.cli.client import bodies_for
from cotenant.cli.loading import load_settings, load_unplanned
from cotenant.cli.loadtest import under_load
from cotenant.cli.served_process import served_process
from cotenant.cli.validate import MIN_REQUESTS
from cotenant.core.units import show_seconds
from cotenant.planners import Problem
from cotenant.planners.forecast import forecast
from cotenant.predictors.gaussian_process import GaussianProcess
from cotenant.render.table import table
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.zoo import build_models

CLOSE = 0.1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the p99s of a model in seconds, live and predicted."""

    load: float
    model: str
    requests: int
    live: float
    formula: float
    simulated: float
    median: float


async def rows(problem: Problem, flags: Sequence[str], loads: Sequence[float], seconds: float, seed: int) -> list[Row]:
    """Measure at each load. flags: of `cotenant serve`, whose plan must be for this problem."""
    assert isinstance(problem.interference, GaussianProcess)
    middle = msgspec.structs.replace(problem, interference=problem.interference.with_quantile(0.5))
    measured = []
    async with served_process(flags) as (plan, http, _):
        models = [model for model in problem.models if plan.rate(model.name)]
        bodies = await bodies_for(http, models, seed)
        for load in loads:
            rates = {model.name: plan.rate(model.name) * load for model in models}
            live = await under_load(http, models, bodies, rates, seconds=seconds, seed=seed, quiet=True)
            changed = {"rates": rates, "objective": "devices"}
            formula = forecast(plan, msgspec.structs.replace(problem, **changed)).models
            simulated, median = (
                {
                    row.model: row
                    for row in simulate(plan, variant, Workload.poisson(rates), seconds=seconds, seed=seed).models
                }
                for variant in (problem, middle)
            )
            for row in live.models:
                own, other = simulated[row.model].p99, median[row.model].p99
                if row.p99 is None or own is None or other is None:
                    continue
                measured.append(
                    Row(
                        load=load,
                        model=row.model,
                        requests=sum(row.outcomes.values()),
                        live=row.p99,
                        formula=formula[row.model].p99,
                        simulated=own,
                        median=other,
                    )
                )
    return measured


def show(found: Sequence[Row]) -> None:
    console = Console(width=150)
    view = table(
        "live p99, relative to predictions",
        *(">load", "model", ">requests", ">live", ">formula", ">simulated", ">simulated with median"),
    )
    for row in found:
        relative = (f"{row.live / predicted - 1:+.0%}" for predicted in (row.formula, row.simulated, row.median))
        view.add_row(f"{row.load:g}", row.model, str(row.requests), show_seconds(row.live), *relative)
    console.print(view)
    enough = [row for row in found if row.requests >= MIN_REQUESTS]
    for name in ("formula", "simulated", "median"):
        close = sum(abs(row.live / getattr(row, name) - 1) <= CLOSE for row in enough)
        print(
            f"predicted: {name}: {close} of {len(enough)} p99s within 10 %, of models with at least {MIN_REQUESTS}"
            " requests"
        )
    print(f"load average {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--load", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--repository", type=Path, default=Path("models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    build_models(given.repository)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings.toml")
        path.write_text(
            f'profiles = "{given.profiles.absolute()}"\n'
            f'interference = {{ model = "gaussian-process", fit = "{given.pairs.absolute()}" }}\n'
            + settings(given.repository)
        )
        problem = load_unplanned(load_settings(path)).problem
        found = uvloop.run(rows(problem, [str(path)], given.load, given.seconds, given.seed))
    if given.json:
        print(msgspec.json.encode(found).decode())
        return
    show(found)


if __name__ == "__main__":
    main()
