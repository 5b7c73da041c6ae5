"""Define the commands, one function each. Slow imports happen where they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cotenant import __version__
from cotenant.cli import models
from cotenant.cli.capacity import capacity
from cotenant.cli.colocate import colocate
from cotenant.cli.fit import fit
from cotenant.cli.infer import infer
from cotenant.cli.loading import (
    load_planned,
    load_problem,
    load_settings,
    load_unplanned,
    read_bytes,
    with_time_limit,
    write_file,
)
from cotenant.cli.options import (
    LOCAL,
    AccessLog,
    Adapt,
    CaFile,
    Duration,
    EventLog,
    GrpcPort,
    Host,
    HttpPort,
    Json,
    LogFormatOption,
    LogLevelOption,
    MaxQueueDelay,
    MetricsPort,
    ModelRepository,
    OtlpEndpoint,
    PlannerName,
    PlotFile,
    ProblemFile,
    Rates,
    Scale,
    Seed,
    ServerAddress,
    ServerSettings,
    SettingsFile,
    StateFileOption,
    TimeLimit,
    TokenFile,
)
from cotenant.cli.output import console, print_labelled, print_written, show_json
from cotenant.cli.reload import reload
from cotenant.cli.reproduce import reproduce
from cotenant.cli.simulate import simulate
from cotenant.cli.status import status
from cotenant.cli.validate import validate
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError
from cotenant.render.report import report_table

ExampleRepository = Annotated[
    Path,
    typer.Option(
        "--model-repository",
        "-r",
        envvar="COTENANT_MODEL_REPOSITORY",
        help="Model repository to write the models into.",
    ),
]

app = typer.Typer(
    name="cotenant",
    help="Serve many machine-learning models on few shared accelerators, each within its latency SLO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        console.print(f"cotenant {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
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
    plot: Annotated[Path, typer.Option("--plot", help="Draw the plan into this file.")] = Path("demo/plan.svg"),
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Build example models, profile, plan and serve them, send real requests and load, and report."""
    import uvloop

    from cotenant.app.lifecycle import check_ports
    from cotenant.cli.demo import build_zoo, run

    addresses = {"host": host, "http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    settings = load_settings(None, model_repository, planner, **addresses)
    check_ports(settings)
    built = build_zoo(model_repository, None, seed, quiet=json)  # not within a loop, whose end would wait for it
    uvloop.run(run(built, settings, keep=keep, seconds=duration, scale=scale, plot=plot, seed=seed, json=json))


@app.command()
def examples(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models to build. Default: those of the demo.")
    ] = None,
    model_repository: ExampleRepository = Path("models"),
    torch: Annotated[
        bool,
        typer.Option("--torch", help="Build PyTorch models, for GPUs; `gpulet` and `kace` name the papers' sets."),
    ] = False,
    files: Annotated[
        Path | None,
        typer.Option("--files", metavar="FOLDER", help="Copy the example files of the documentation there and exit."),
    ] = None,
    seed: Seed = 0,
    list_: Annotated[bool, typer.Option("--list", help="List the models that can be built and exit.")] = False,
    json: Json = False,
) -> None:
    """Build example models: the papers' architectures, small trained models, a sentence embedder."""
    from cotenant.zoo import TORCH, ZOO

    if list_:
        recipes = TORCH if torch else ZOO
        if json:
            show_json(recipes)
        else:
            for name, recipe in recipes.items():
                console.print(f"{name:16} {recipe.summary}", highlight=False)
        return
    if files is not None:
        if names or torch:
            raise ConfigError("--files copies problem, profile and workload files; it builds no models")
        from cotenant.cli.example_files import copy_examples

        for path in copy_examples(files):
            print_written(path)
        return
    from cotenant.cli.demo import build_zoo

    built = build_zoo(model_repository, names, seed, torch=torch)
    if json:
        show_json(msgspec.json.format(msgspec.json.encode(built, enc_hook=str), indent=2))


@app.command()
def profile(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profiles into this CSV file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Profile again what has been profiled.")] = False,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", help="Also run models co-located; write the samples into this CSV file.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Co-located runs of --pairs. Default: a fifth of all pairs, and larger sets."
        ),
    ] = None,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Profile the models of a repository over batch size and share of a device. Results are cached."""
    from cotenant.core.profile import write_profiles
    from cotenant.profiling.machine_load import foreign_load, is_busy
    from cotenant.render.figure import check_drawable
    from cotenant.render.profiles import profile_table, save_profiles

    if plot is not None:
        check_drawable(plot)  # an error now, not after minutes
    if count is not None and pairs is None:
        raise ConfigError("--count is the number of co-located runs; it goes with --pairs")
    if pairs is not None:
        from cotenant.cli.pairs import existing_samples

        if pairs == output:
            raise ConfigError(f"--output and --pairs are both {str(pairs)!r}; profiles and samples need a file each")
        existing_samples(pairs)  # an error now, not after minutes
    server_settings = load_settings(settings, model_repository)
    deployment = load_unplanned(server_settings, force=force, full=True)
    profiles = list(deployment.problem.profiles.values())
    for name, reason in deployment.broken.items():
        print_labelled("not profiled:", f"{name}: {reason}")
    for each in profiles:
        if is_busy(each):
            part = f"{100 * foreign_load(each):.0f} % of the processors"
            print_labelled("busy machine:", f"other programs used {part} while {each.model} was profiled")
    text = write_profiles(profiles)
    if output is not None:
        write_file(output, text)
    if plot is not None:
        save_profiles(profiles, plot)
        print_written(plot)
    if pairs is not None:
        from cotenant.app.backend import create_backend
        from cotenant.cli.pairs import record_pairs

        record_pairs(deployment, create_backend(server_settings), pairs, count)
    if json:
        show_json(msgspec.json.encode([{"model": p.model, "kind": p.kind, "points": p.points} for p in profiles]))
    elif output is None and pairs is None:
        for each in profiles:
            console.print(profile_table(each))


@app.command()
def plan(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare all planners.")] = False,
    planners: Annotated[
        str | None, typer.Option("--planners", metavar="A,B,...", help="Planners that --compare compares.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show why this plan, each model's bottleneck, and what relaxing it would gain."),
    ] = False,
    no_portfolio: Annotated[
        bool, typer.Option("--no-portfolio", help="Try no other planners beside geometry.")
    ] = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="CURRENT", help="Show what changes from this plan (JSON file).")
    ] = None,
    time_limit: TimeLimit = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan into this JSON file.")] = None,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Plan shares, batch sizes and placement of models, and predict SLO attainment."""
    from cotenant.cli.plan import PlanAnswer, explain_with_gains, show_plan
    from cotenant.render.figure import check_drawable
    from cotenant.render.plan_figure import save_plan

    if plot is not None:
        check_drawable(plot)  # an error now, not after profiling
    if compare:
        given = {"--planner": planner, "--explain": explain, "--diff": diff, "--output": output, "--plot": plot}
        if wrong := [flag for flag, value in given.items() if value]:
            raise ConfigError(f"{wrong[0]} is about one plan; leave it out, or leave out --compare")
        compare_plans(problem, settings, model_repository, planners, time_limit, portfolio=not no_portfolio, json=json)
        return
    if planners is not None:
        raise ConfigError("--planners goes with --compare; --planner selects the planner of one plan")
    current = None if diff is None else Plan.from_json(read_bytes(diff), str(diff))
    portfolio = not no_portfolio
    asked, answer = load_planned(problem, settings, model_repository, planner, current, time_limit, portfolio=portfolio)
    if output is not None:
        write_file(output, answer.to_json().decode())
    if plot is not None:
        save_plan(answer, plot)
        print_written(plot)
    reasons = explain_with_gains(asked, answer, portfolio=portfolio) if explain else None
    show_plan(PlanAnswer(problem=asked, plan=answer, current=current, file=str(diff), reasons=reasons), json=json)


def compare_plans(
    problem: Path | None,
    settings: Path | None,
    model_repository: Path | None,
    planners: str | None,
    time_limit: float | None,
    *,
    portfolio: bool,
    json: bool,
) -> None:
    """Plan with every planner and compare the results: `plan --compare`."""
    from cotenant.cli.compare import compare_planners, comparison_view, parse_planners

    names = parse_planners(planners)
    parsed = with_time_limit(time_limit, load_problem(problem, settings, model_repository))
    found = compare_planners(parsed, names, portfolio=portfolio)
    if json:
        show_json(found)
    else:
        console.print(comparison_view(found))


app.command()(simulate)
app.command()(capacity)
app.command()(validate)
app.command()(colocate)
app.command()(fit)


@app.command()
def serve(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    max_queue_delay: MaxQueueDelay = None,
    adapt: Adapt = None,
    event_log: EventLog = None,
    state: StateFileOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    access_log: AccessLog = None,
    otlp_endpoint: OtlpEndpoint = None,
    json: Json = False,
) -> None:
    """Serve a model repository over HTTP and gRPC until Ctrl-C."""
    import uvloop

    from cotenant.cli.serve import run

    def read() -> Any:
        return load_settings(
            settings,
            model_repository,
            planner,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            max_queue_delay=max_queue_delay,
            adapt=adapt,
            event_log=event_log,
            state=state,
            log_level=log_level,
            log_format=log_format,
            access_log=access_log,
            otlp_endpoint=otlp_endpoint,
        )

    uvloop.run(run(read, json=json))


@app.command()
def loadtest(
    address: ServerAddress = LOCAL,
    rate: Rates = None,
    scale: Scale = 1.0,
    duration: Duration = 10.0,
    seed: Seed = 0,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Send open-loop random load to a server, and report throughput, latency and SLO attainment."""
    import uvloop

    from cotenant.cli.client import endpoint
    from cotenant.cli.loadtest import run

    server = endpoint(address, token_file, ca_file)
    report = uvloop.run(run(server, rate or (), scale=scale, seconds=duration, seed=seed, quiet=json))
    if json:
        show_json(report.to_json())
    else:
        console.print(report_table(report))


app.command()(status)
app.add_typer(models.app, name="models")
app.command()(infer)
app.command()(reload)


@app.command()
def replay(
    log: Annotated[
        Path, typer.Argument(metavar="EVENT_LOG", help="Event log that `cotenant serve --event-log` wrote.")
    ],
    json: Json = False,
) -> None:
    """Replay an event log through a fresh dispatcher and a fresh controller, and compare their decisions."""
    from cotenant.control.event_log import replay as run

    result = run(read_bytes(log).splitlines(), str(log))
    outcomes = [
        {"model": model, "outcome": outcome, "count": count}
        for (model, outcome), count in sorted(result.outcomes.items())
    ]
    if json:
        show_json(
            msgspec.json.encode(
                {
                    "events": result.events,
                    "seconds": result.seconds,
                    "outcomes": outcomes,
                    "controller_events": result.controller_events,
                    "solves": result.solves,
                    "rolls": result.rolls,
                    "identical": not result.difference,
                    "difference": result.difference,
                }
            )
        )
    else:
        console.print(f"{result.events} events in {result.seconds:.3f} s", highlight=False)
        for row in outcomes:
            console.print(f"  {row['model']}: {row['count']} {row['outcome']}", highlight=False)
        if result.controller_events:
            asked = f"planned {result.solves} times, rolled out {result.rolls} plans"
            console.print(f"  controller: {result.controller_events} events, {asked}", highlight=False)
        console.print("decisions identical" if not result.difference else f"[red]differs[/] at {result.difference}")
    if result.difference:
        raise typer.Exit(1)


app.command()(reproduce)


@app.command()
def devices(json: Json = False) -> None:
    """Show the devices of this machine, what runs on them, and which backends can partition them."""
    from cotenant.cli.devices import inspect_machine, machine_view

    machine = inspect_machine()
    if json:
        show_json(machine)
    else:
        console.print(machine_view(machine))
