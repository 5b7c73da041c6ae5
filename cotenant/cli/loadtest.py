"""Send open-loop random load to a running server: `cotenant loadtest`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rich.live import Live

from cotenant.cli.client import Address, ServerEndpoint, bodies_for, fetch_status
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.output import console
from cotenant.cli.rates import chosen_rates
from cotenant.core.model import Model
from cotenant.errors import ConfigError
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import Report
from cotenant.render.report import report_table
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals


async def run(
    address: ServerEndpoint, rates: Sequence[str], *, scale: float, seconds: float, seed: int, quiet: bool
) -> Report:
    """Send Poisson load to the models of a server: `scale` times the planned rates, or the rates given."""
    status = await asyncio.to_thread(fetch_status, address)
    requested = chosen_rates(status.planned, rates, scale)
    models = [Model(name=name, slo=status.targets[name]) for name, rate in requested.items() if rate > 0]
    if not models:
        raise ConfigError("no model has a rate above 0; give some with --rate MODEL=REQUESTS_PER_SECOND")
    bodies = await bodies_for(address, models, seed)
    return await under_load(address, models, bodies, requested, seconds=seconds, seed=seed, quiet=quiet)


async def under_load(
    address: Address,
    models: Sequence[Model],
    bodies: Mapping[str, RequestBody],
    rates: Mapping[str, float],
    *,
    seconds: float,
    seed: int,
    quiet: bool,
) -> Report:
    """Send Poisson arrivals to a server and report the outcomes; shows a live table unless `quiet`."""
    arrivals = generate_arrivals(Workload.poisson({model.name: rates[model.name] for model in models}), seconds, seed)
    tune_for_latency()
    server = ServerEndpoint.of(address)
    bodies = {name: body.with_headers(server.headers()) for name, body in bodies.items()}
    address, tls = server.address, server.tls()
    if quiet:
        return await generate_load(address, models, bodies, arrivals, seconds, tls=tls)
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(report: Report) -> None:
            live.update(report_table(report), refresh=True)

        return await generate_load(address, models, bodies, arrivals, seconds, on_tick=show, tls=tls)
