"""The simulator against the live server: the demo's plan and the same arrivals through both.

    python -m benchmarks.agree [--seconds 60] [--load 1.0] [--repository models]

The target: attainment within 2 points and p99 within 15 %, for every model with at least 200 requests: with fewer,
chance moves a p99 by more than that.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from cotenant.cli.client import body_of, under_load
from cotenant.cli.demo import demo_settings
from cotenant.cli.prepare import Preparation, backend_of
from cotenant.cli.serving import serving
from cotenant.measure.report import ModelReport, Report, compare
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.zoo import build
from cotenant.zoo.answers import ask

ENOUGH = 200


async def live_and_simulated(repository: Path, seconds: float, load: float, seed: int) -> tuple[Report, Report]:
    built = build(repository)
    settings = demo_settings(repository, 0, None)
    backend = backend_of(settings)
    preparation = Preparation(settings, backend)
    site = await preparation.site([model.name for model in built])
    models = [model for model in site.problem.models if site.plan.rate(model.name)]
    rates = {model.name: site.plan.rate(model.name) * load for model in models}
    bodies = {model.name: body_of(ask(model.name, np.random.default_rng(seed)).requests[0]) for model in models}
    async with serving(settings, backend, preparation, site) as (server, addresses):
        live = await under_load(addresses.http, models, bodies, rates, seconds=seconds, seed=seed, quiet=True)
        live = server.with_batches(live)
    return live, simulate(site.problem, site.plan, Workload.poisson(rates), seconds=seconds, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--repository", type=Path, default=Path("models"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    live, simulated = uvloop.run(live_and_simulated(given.repository, given.seconds, given.load, given.seed))
    console = Console(width=150)
    console.print(live.table())
    console.print(compare(simulated, live))
    points, tails = [], []
    for a, b in zip(simulated.models, live.models, strict=True):
        if min(sum(a.ends.values()), sum(b.ends.values())) >= ENOUGH:
            points.append(abs((b.attainment or 0.0) - (a.attainment or 0.0)) * 100)
            tails.append(abs((b.p99 or 0.0) / (a.p99 or 1.0) - 1) * 100)
    together = abs(_attainment(live.models) - _attainment(simulated.models)) * 100
    worst = f"{max(points):.2f} points, p99 {max(tails):.0f} %" if points else f"no model with {ENOUGH} requests"
    print(
        f"agree: attainment of all {together:.2f} points apart (target 2), worst model {worst} (targets 2, 15 %); "
        f"{given.seconds:g} s at {given.load:g} x the planned rates, load average {os.getloadavg()[0]:.1f}"
    )


def _attainment(models: tuple[ModelReport, ...]) -> float:
    """Of all requests together."""
    arrived = sum(sum(model.ends.values()) for model in models)
    return sum((model.attainment or 0.0) * sum(model.ends.values()) for model in models) / arrived


if __name__ == "__main__":
    main()
