"""Send open-loop random load to a running server: `cotenant loadtest`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop
from rich.live import Live

from cotenant.cli.client import Address, ServerEndpoint, bodies_for, endpoint, fetch_status
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.options import LOCAL, CaFile, Duration, Json, Rates, Scale, Seed, ServerAddress, TokenFile
from cotenant.cli.output import console, show_json
from cotenant.cli.rates import chosen_rates
from cotenant.cli.report_file import ReportFile, check_report
from cotenant.core.model import Model
from cotenant.core.units import show_count, show_seconds
from cotenant.errors import ConfigError
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import Report
from cotenant.render.report import report_table
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals


def loadtest(
    address: ServerAddress = LOCAL,
    rate: Rates = None,
    scale: Scale = 1.0,
    duration: Duration = 10.0,
    seed: Seed = 0,
    report: ReportFile = None,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Send open-loop random load to a server, and report throughput, latency and SLO attainment."""
    check_report(report)
    server = endpoint(address, token_file, ca_file)
    result = uvloop.run(run(server, rate or (), scale=scale, seconds=duration, seed=seed, quiet=json))
    if report is not None:
        report_load(report, result, address)
    if json:
        show_json(result.to_json())
    else:
        console.print(report_table(result))


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


def report_load(path: Path, report: Report, address: str) -> None:
    """Write the report of a load test."""
    from cotenant.cli.report_file import write_report
    from cotenant.cli.reports import run_section, run_verdict

    answer, good = run_verdict(report)
    write_report(
        path,
        title=f"Load test of {show_count(len(report.models), 'model')}",
        question=f"Does the server at {address} keep its SLOs under {show_seconds(report.seconds)} of Poisson load?",
        answer=answer,
        good=good,
        sections=[run_section(report)],
    )
