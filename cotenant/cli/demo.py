"""Build, profile, plan, serve and load real models, on shares of this machine's CPU: `cotenant demo`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
from rich.text import Text

from cotenant.app.backend import create_backend
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.running_server import Addresses, RunningServer
from cotenant.app.startup import Prepared
from cotenant.cli.client import body_of, infer
from cotenant.cli.demo_rates import DEMO_WORK, DemoPlan, plan_demo
from cotenant.cli.file_limit import raise_file_limit
from cotenant.cli.interrupt import interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.loadtest import under_load
from cotenant.cli.output import aside, console, print_labelled, profile_progress, progress_bars, show_json
from cotenant.cli.serve import show_addresses, show_deployment
from cotenant.config import ModelSettings, Settings
from cotenant.errors import FailedError
from cotenant.live.deployment import Deployment
from cotenant.measure.report import ModelReport, Report
from cotenant.profiling.machine_load import describe_load, measure_load, slowdowns_under
from cotenant.render.plan_figure import save_plan
from cotenant.render.report import report_table
from cotenant.render.table import table
from cotenant.zoo import ZOO, Built, build_models, recipe_of
from cotenant.zoo.answers import ExampleRequest, example_request


async def run(
    built: Sequence[Built],
    settings: Settings,
    *,
    keep: bool,
    seconds: float,
    scale: float,
    plot: Path,
    seed: int,
    json: bool,
) -> None:
    async with interruptible():
        settings = demo_settings(settings)
        backend = create_backend(settings)

        async def prepare(builder: DeploymentBuilder) -> Prepared:
            described = await builder.describe([model.name for model in built])
            load = await asyncio.to_thread(measure_load) if backend.name == "cpu" else None
            slowdowns = slowdowns_under(load, described.problem.profiles)
            if load is not None and load.busy and not json:
                print_labelled("busy machine:", describe_load(load, slowdowns), console)
            chosen = await asyncio.to_thread(plan_demo, described.problem, settings.planner, slowdowns)
            deployment = msgspec.structs.replace(described, problem=chosen.problem, plan=chosen.plan)
            save_plan(deployment.plan, plot)
            if not json:
                _show_rates(chosen)
                show_deployment(deployment, backend.isolation())
                console.print(f"drawn in {plot}", highlight=False)
            return Prepared(deployment)

        raise_file_limit()
        async with AsyncExitStack() as stack:
            with profile_progress() as progress:
                server = await stack.enter_async_context(running(settings, backend, prepare, progress=progress))
            tune_for_latency()
            addresses = server.addresses
            examples = {name: example_request(name, np.random.default_rng(seed)) for name in _placed(server.deployment)}
            if not json:
                show_addresses(addresses)
                console.print("try:", _example(addresses, examples, plot.parent), highlight=False, soft_wrap=True)
                await _show_answers(addresses, examples)
            report = await _load(server, addresses, examples, seconds=seconds, scale=scale, seed=seed, quiet=json)
            if json:
                show_json(report.to_json())
            else:
                console.print(report_table(report))
                for row in report.models:
                    if not row.slo_met:
                        print_labelled("SLO violated:", _violation(row), console)
            if keep:
                aside.print(f"still serving at http://{addresses.http}; Ctrl-C stops", highlight=False)
                await asyncio.Event().wait()


def _show_rates(chosen: DemoPlan) -> None:
    """Say what the demo asks of the machine, and what of that it cannot have."""
    for line in chosen.missed:
        print_labelled("cannot be kept:", line, console)
    if chosen.fraction < 1:
        console.print(f"asking for {chosen.fraction * 100:.0f} % of these rates instead", highlight=False)
    rates = sum(chosen.problem.rates.values())
    console.print(
        f"rates: {rates:.0f} requests/s in all, which take {chosen.fraction * DEMO_WORK * 100:.0f} % of the machine; "
        "the rest is headroom for the server, this program, others and chance",
        highlight=False,
        soft_wrap=True,
    )


def _violation(row: ModelReport) -> str:
    attainment = 0.0 if row.attainment is None else row.attainment
    return f"{row.model} {attainment * 100:.1f} % < {row.required * 100:g} %"


def build_zoo(
    repository: Path, names: Iterable[str] | None, seed: int, *, quiet: bool = False, torch: bool = False
) -> list[Built]:
    """Build example models, with a progress bar, and a line for each model unless `quiet`."""
    with progress_bars("building", transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(name: str, done: int, total: int) -> None:
            progress.start()
            progress.update(task, description=name, completed=done, total=total)

        built = build_models(repository, names, seed, show, torch=torch)
    if not quiet:
        for model in built:
            score = f"; {model.notes['score']}" if "score" in model.notes else ""
            state = "built" if model.fresh else "up to date"
            console.print(
                f"{model.name:16} {state}: {recipe_of(model.name, torch=torch).summary}{score}", highlight=False
            )
    return built


def demo_settings(settings: Settings) -> Settings:
    """Add the example models: their targets, and rates in fixed proportions, to be scaled once they are profiled."""
    return msgspec.structs.replace(
        settings,
        models=tuple(
            ModelSettings(name=name, slo=recipe.slo, rate=recipe.weight) for name, recipe in ZOO.items() if recipe.demo
        ),
        objective="rate",  # of benchmarks, which want the limit; the demo asks for less
        adapt=False,  # the report is held against the plan
    )


def _placed(deployment: Deployment) -> list[str]:
    return [model.name for model in deployment.problem.models if deployment.plan.rate(model.name)]


def _example(addresses: Addresses, examples: dict[str, ExampleRequest], folder: Path) -> str:
    """Return a command line that sends a real request, which is written into a file as JSON."""
    name = "digits" if "digits" in examples else next(iter(examples))
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "data": tensor.array().ravel().tolist(),
        }
        for tensor in examples[name].requests[0]
    ]
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode({"inputs": inputs}))
    return f"curl -d @{path} http://{addresses.http}/v2/models/{name}/infer"


async def _show_answers(addresses: Addresses, examples: dict[str, ExampleRequest]) -> None:
    """Show what each model answers to real input."""
    rows = table("real input, real outputs", "model", "input", "output")
    for name, example in examples.items():
        try:
            answers = [await asyncio.to_thread(infer, addresses.http, name, inputs) for inputs in example.requests]
            rows.add_row(name, example.what, example.read(answers))
        except FailedError as error:
            rows.add_row(name, example.what, Text(str(error), style="red"))
    console.print(rows)


async def _load(
    server: RunningServer,
    addresses: Addresses,
    examples: dict[str, ExampleRequest],
    *,
    seconds: float,
    scale: float,
    seed: int,
    quiet: bool,
) -> Report:
    """Send Poisson arrivals of the same real inputs to all models at once, at a multiple of the planned rates."""
    deployment = server.deployment
    models = [model for model in deployment.problem.models if model.name in examples]
    rates = {model.name: deployment.plan.rate(model.name) * scale for model in models}
    bodies = {name: body_of(example.requests[0]) for name, example in examples.items()}
    report = await under_load(addresses.http, models, bodies, rates, seconds=seconds, seed=seed, quiet=quiet)
    return server.with_batch_means(report)
