"""Build, profile, plan, serve and load real models, on shares of this machine's CPU: `cotenant demo`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
import uvloop
from rich.text import Text

from cotenant.app.backend import create_backend
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import check_ports, running
from cotenant.app.running_server import Addresses, RunningServer
from cotenant.app.startup import MEASURING, Prepared
from cotenant.cli.client import body_of, infer
from cotenant.cli.demo_job import check_can_train, training
from cotenant.cli.demo_rates import DEMO_WORK, DemoPlan, plan_demo_once
from cotenant.cli.examples import ExampleRepository, build_zoo
from cotenant.cli.file_limit import raise_file_limit
from cotenant.cli.interrupt import interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.loading import load_settings, write_file
from cotenant.cli.loadtest import under_load
from cotenant.cli.options import Duration, GrpcPort, Host, HttpPort, Json, MetricsPort, PlannerName, Scale, Seed
from cotenant.cli.output import aside, console, print_labelled, print_written, profile_progress, show_json
from cotenant.cli.report_file import ReportFile, check_files
from cotenant.cli.reports import describe_attainment, run_verdict
from cotenant.cli.serve import show_addresses, show_deployment
from cotenant.config import ModelSettings, Settings
from cotenant.core.job import JobStatus
from cotenant.core.units import show_count
from cotenant.errors import FailedError
from cotenant.live.deployment import Deployment
from cotenant.measure.report import Report
from cotenant.profiling.machine_load import describe_load, measure_load, slowdowns_under
from cotenant.render.plan_figure import save_plan
from cotenant.render.report import report_table
from cotenant.render.table import table
from cotenant.zoo import ZOO, Built

if TYPE_CHECKING:
    from cotenant.zoo.answers import ExampleRequest


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep serving after the report, until Ctrl-C.")] = False,
    duration: Duration = 10.0,
    scale: Scale = 1.0,
    model_repository: ExampleRepository = Path("models"),
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    planner: PlannerName = None,
    plot: Annotated[Path, typer.Option("--plot", help="Draw the plan into this .svg, .png or .pdf file.")] = Path(
        "demo/plan.svg"
    ),
    report: ReportFile = None,
    job: Annotated[bool, typer.Option("--job", help="Also train a digit reader with PyTorch, on idle share.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Build, profile, plan and serve example models, send requests and load, and print a report."""
    check_files(plot, report)
    if job:
        check_can_train()
    addresses = {"host": host, "http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    settings = load_settings(None, model_repository, planner, **addresses)
    check_ports(settings)
    built = build_zoo(model_repository, None, seed, quiet=json)  # not within a loop, whose end would wait for it
    # Jobs of other runs are none of the demo's, and its own end with it.
    with tempfile.TemporaryDirectory(prefix="cotenant-demo-") as folder:
        own = msgspec.structs.replace(settings, jobs=msgspec.structs.replace(settings.jobs, folder=Path(folder)))
        uvloop.run(
            run(
                built, own, keep=keep, seconds=duration, scale=scale, plot=plot, report=report, train=job, seed=seed,
                json=json,
            )
        )  # fmt: skip


async def run(
    built: Sequence[Built],
    settings: Settings,
    *,
    keep: bool,
    seconds: float,
    scale: float,
    plot: Path,
    report: Path | None,
    train: bool,
    seed: int,
    json: bool,
) -> None:
    async with interruptible():
        settings = demo_settings(settings)
        backend = create_backend(settings)
        told: list[str] = []  # of the machine and the rates
        examples: asyncio.Task[dict[str, ExampleRequest]]

        async def prepare(builder: DeploymentBuilder) -> Prepared:
            nonlocal examples
            described = await builder.describe([model.name for model in built])
            builder.say(MEASURING)
            load = await asyncio.to_thread(measure_load) if backend.name == "cpu" else None
            slowdowns = slowdowns_under(load, described.problem.profiles)
            if load is not None and load.busy:
                told.append(f"Busy machine: {describe_load(load, slowdowns)}.")
                if not json:
                    print_labelled("busy machine:", describe_load(load, slowdowns), console)
            builder.say("planning")
            chosen = await asyncio.to_thread(plan_demo_once, described.problem, settings, slowdowns)
            told.extend([*(f"SLO out of reach: {line}." for line in chosen.missed), f"{_describe_rates(chosen)}."])
            deployment = msgspec.structs.replace(described, problem=chosen.problem, plan=chosen.plan)
            if not json:
                _show_rates(chosen)
                show_deployment(deployment, backend.isolation())
            examples = asyncio.create_task(asyncio.to_thread(_examples, deployment, seed))  # while the workers start
            stack.push_async_callback(_end, examples)  # they may fail to
            return Prepared(deployment)

        raise_file_limit()
        async with AsyncExitStack() as stack:
            with profile_progress() as progress:
                server = await stack.enter_async_context(running(settings, backend, prepare, progress=progress))
            tune_for_latency()
            addresses = server.addresses
            if not json:
                show_addresses(addresses)
            requests = await examples
            if not json:
                console.print("try:", _example(addresses, requests, plot.parent), highlight=False, soft_wrap=True)
                await _show_answers(addresses, requests)
            trained: JobStatus | None = None
            async with training(server.jobs, _say_nothing if json else _say) if train else nullcontext() as watch:
                result = await _load(server, addresses, requests, seconds=seconds, scale=scale, seed=seed, quiet=json)
                if watch is not None:
                    trained = await watch.look()
                    told.append(f"A digit reader was trained on idle share: {watch.summary(trained)}.")
            if json:
                show_json(result.to_json() if trained is None else _with_job(result, trained))
            else:
                console.print(report_table(result))
                if watch is not None and trained is not None:
                    print_labelled("trained on idle share:", watch.summary(trained), console)
                for row in result.models:
                    if not row.slo_met:
                        print_labelled("SLO violated:", describe_attainment(row), console)
            await asyncio.to_thread(save_plan, server.deployment.plan, plot)  # once nobody waits for answers
            if not json:
                print_written(plot)
            if report is not None:
                await asyncio.to_thread(report_demo, report, server.deployment, result, told)
            if keep:
                aside.print(f"still serving at http://{addresses.http}; Ctrl-C stops", highlight=False)
                await asyncio.Event().wait()


async def _end(task: asyncio.Task[Any]) -> None:
    """End a task that nobody waits for any more; its error is of no interest then."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _show_rates(chosen: DemoPlan) -> None:
    """Say what the demo asks of the machine, and what of that it cannot have."""
    for line in chosen.missed:
        print_labelled("SLO out of reach:", line, console)
    if chosen.fraction < 1:
        console.print(f"planning for {chosen.fraction * 100:.0f} % of these rates instead", highlight=False)
    console.print(_describe_rates(chosen), highlight=False, soft_wrap=True)


def _describe_rates(chosen: DemoPlan) -> str:
    rates = sum(chosen.problem.rates.values())
    return (
        f"rates: {rates:.0f} requests/s in all, which take {chosen.fraction * DEMO_WORK * 100:.0f} % of the machine; "
        "the rest is headroom for the server, this program, other programs and random bursts"
    )


def report_demo(path: Path, deployment: Deployment, result: Report, told: Sequence[str]) -> None:
    """Write the report of a demo. told: what was said of the machine and the rates."""
    from cotenant.cli.report_file import write_report
    from cotenant.cli.reports import asked_section, configuration_sections, plan_listing, plan_section, run_section

    problem, plan = deployment.problem, deployment.plan
    answer, good = run_verdict(result)
    if left := ", ".join(plan.unserved):
        answer.insert(0, f"Not all models are served in full: the machine has no share left for {left}.")
    write_report(
        path,
        title=f"Demo of {show_count(len(problem.models), 'model')} on one machine",
        question="Are the SLOs of all models kept while they share this machine, under random load?",
        answer=[*answer, *told],
        good=good and not left,
        sections=[
            run_section(result),
            plan_section(plan, problem),
            configuration_sections(problem, problem.profiles.values(), plan)[1],
            asked_section(problem),
            plan_listing(plan),
        ],
    )


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _say_nothing(line: str) -> None:
    pass


def _with_job(result: Report, trained: JobStatus) -> bytes:
    """Return the report as JSON, with what the job came to."""
    report = msgspec.json.decode(result.to_json())
    return msgspec.json.encode(report | {"job": trained}, enc_hook=str)


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


def _examples(deployment: Deployment, seed: int) -> dict[str, ExampleRequest]:
    """Return an example request for each model that is placed. What they are made of takes a second to import."""
    from cotenant.zoo.answers import example_request

    placed = [model.name for model in deployment.problem.models if deployment.plan.rate(model.name)]
    return {name: example_request(name, np.random.default_rng(seed)) for name in placed}


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
    write_file(path, msgspec.json.encode({"inputs": inputs}).decode(), quiet=True)
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
