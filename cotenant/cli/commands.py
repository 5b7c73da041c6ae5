"""The commands, one function each. What takes long to import is imported where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cotenant import __version__
from cotenant.cli.capacity import capacity
from cotenant.cli.colocate import colocate
from cotenant.cli.fit import fit
from cotenant.cli.loading import (
    load_deployment,
    load_planned,
    load_problem,
    load_settings,
    read_bytes,
    with_time_limit,
    write_file,
)
from cotenant.cli.options import (
    Json,
    PlannerName,
    PlotFile,
    ProblemFile,
    Rates,
    Repository,
    Seconds,
    Seed,
    ServerSettings,
    SettingsFile,
    TimeLimit,
)
from cotenant.cli.output import console, print_labelled, print_written, show_json
from cotenant.cli.reproduce import reproduce
from cotenant.cli.simulate import simulate
from cotenant.cli.validate import validate
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError

app = typer.Typer(
    name="cotenant",
    help="Serve many machine-learning models on few shared accelerators, each within its latency target.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"cotenant {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Stay up after the report, until Ctrl-C.")] = False,
    seconds: Seconds = 10.0,
    load: Annotated[float, typer.Option("--load", min=0.01, help="Multiple of the planned rates.")] = 1.0,
    repository: Annotated[Path, typer.Option("--repository", "-r", help="Where the models go.")] = Path("models"),
    port: Annotated[int, typer.Option(help="For HTTP; gRPC takes the next, metrics the one after. 0: any.")] = 8000,
    planner: PlannerName = None,
    plot: Annotated[Path, typer.Option("--plot", help="Draw the plan into this file.")] = Path("demo/plan.svg"),
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Build models, profile them, plan, serve, ask them something, put them under load, and report."""
    import uvloop

    from cotenant.cli.demo import build_zoo, run

    built = build_zoo(repository, None, seed, quiet=json)  # not within a loop, whose end would wait for it
    uvloop.run(
        run(
            built,
            keep=keep,
            seconds=seconds,
            load=load,
            repository=repository,
            port=port,
            planner=planner,
            plot=plot,
            seed=seed,
            json=json,
        )
    )


@app.command()
def examples(
    names: Annotated[list[str] | None, typer.Argument(help="Which models; without names, those of the demo.")] = None,
    repository: Annotated[Path, typer.Option("--repository", "-r", help="Where they go.")] = Path("models"),
    torch: Annotated[
        bool, typer.Option("--torch", help="In PyTorch, for GPUs. Names may be gpulet or kace, too.")
    ] = False,
    seed: Seed = 0,
    list_: Annotated[bool, typer.Option("--list", help="Only say which there are.")] = False,
    json: Json = False,
) -> None:
    """Build models to begin with: the papers' architectures, small trained models, a sentence embedder."""
    from cotenant.zoo import TORCH, ZOO

    if list_:
        recipes = TORCH if torch else ZOO
        if json:
            show_json(recipes)
        else:
            for name, recipe in recipes.items():
                console.print(f"{name:16} {recipe.summary}", highlight=False)
        return
    from cotenant.cli.demo import build_zoo

    built = build_zoo(repository, names, seed, torch=torch)
    if json:
        show_json(msgspec.json.format(msgspec.json.encode(built, enc_hook=str), indent=2))


@app.command()
def profile(
    settings: SettingsFile = None,
    repository: Repository = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profiles into this CSV file.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before, too.")] = False,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", help="Then measure models side by side, into this CSV file.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="With --pairs: so many runs; else a fifth of all pairs, and larger sets."),
    ] = None,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Measure every model of a repository over batch and share of this machine's CPU. Kept for the next time."""
    from cotenant.core.profile import write_profiles
    from cotenant.measure.plan_drawing import check_drawable, profile_table, save_profiles

    if plot is not None:
        check_drawable(plot)  # an error now, not after minutes
    if count is not None and pairs is None:
        raise ConfigError("--count says how many runs side by side; it goes with --pairs")
    if pairs is not None:
        from cotenant.cli.pairs import existing_samples

        if pairs == output:
            raise ConfigError(f"--output and --pairs are both {str(pairs)!r}; profiles and samples need a file each")
        existing_samples(pairs)  # an error now, not after minutes
    asked = load_settings(settings, repository)
    site = load_deployment(asked, again=again, planned=False)
    profiles = list(site.problem.profiles.values())
    for name, reason in site.broken.items():
        print_labelled("not measured", f"{name}: {reason}")
    text = write_profiles(profiles)
    if output is not None:
        write_file(output, text)
    if plot is not None:
        save_profiles(profiles, plot)
        print_written(plot)
    if pairs is not None:
        from cotenant.app.deployment_builder import backend_of
        from cotenant.cli.pairs import record_pairs

        record_pairs(site, backend_of(asked), pairs, count)
    if json:
        show_json(msgspec.json.encode([{"model": p.model, "kind": p.kind, "points": p.points} for p in profiles]))
    elif output is None and pairs is None:
        for each in profiles:
            console.print(profile_table(each))


@app.command()
def plan(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    repository: Repository = None,
    planner: PlannerName = None,
    compare: Annotated[bool, typer.Option("--compare", help="All planners side by side.")] = False,
    planners: Annotated[
        str | None, typer.Option("--planners", metavar="A,B,...", help="With --compare: only these planners.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what binds each model, and what a little more would buy.")
    ] = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="CURRENT", help="Say what changes from this plan, a JSON file.")
    ] = None,
    time_limit: TimeLimit = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan into this JSON file.")] = None,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Decide which model runs where, on what share, in batches of what size; and say what it promises."""
    from cotenant.cli.plan import PlanAnswer, explain_with_gains, show_plan
    from cotenant.measure.plan_drawing import check_drawable, save_plan

    if plot is not None:
        check_drawable(plot)  # an error now, not after profiling
    if compare:
        given = {"--planner": planner, "--explain": explain, "--diff": diff, "--output": output, "--plot": plot}
        if wrong := [flag for flag, value in given.items() if value]:
            raise ConfigError(f"{wrong[0]} is about one plan; leave it out, or leave out --compare")
        compare_plans(problem, settings, repository, planners, time_limit, json=json)
        return
    if planners is not None:
        raise ConfigError("--planners goes with --compare; --planner names the one that plans")
    current = None if diff is None else Plan.from_json(read_bytes(diff), str(diff))
    asked, answer = load_planned(problem, settings, repository, planner, current, time_limit)
    if output is not None:
        write_file(output, answer.to_json().decode())
    if plot is not None:
        save_plan(answer, plot)
        print_written(plot)
    reasons = explain_with_gains(asked, answer) if explain else None
    show_plan(PlanAnswer(problem=asked, plan=answer, current=current, file=str(diff), reasons=reasons), json=json)


def compare_plans(
    problem: Path | None,
    settings: Path | None,
    repository: Path | None,
    planners: str | None,
    time_limit: float | None,
    *,
    json: bool,
) -> None:
    """`plan --compare`."""
    from cotenant.cli.compare import compare_planners, comparison_view, parse_planners

    names = parse_planners(planners)
    found = compare_planners(with_time_limit(time_limit, load_problem(problem, settings, repository)), names)
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
    repository: Repository = None,
    planner: PlannerName = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="For HTTP; gRPC takes the next, metrics the one after.")] = None,
    log: Annotated[Path | None, typer.Option("--log", help="Write an event log, for `cotenant replay`.")] = None,
    json: Json = False,
) -> None:
    """Serve a repository of models over HTTP and gRPC, until Ctrl-C."""
    import uvloop

    from cotenant.cli.serve import run

    def known() -> Any:
        found = load_settings(settings, repository, planner, **({} if log is None else {"log": log}))
        return listening(found, host, port)

    uvloop.run(run(known, json=json))


def listening(settings: Any, host: str | None, port: int | None) -> Any:
    """Settings whose three addresses are on a host, at a port and the two after it."""
    changes = {}
    for offset, name in enumerate(("http", "grpc", "metrics")):
        address = getattr(settings, name)
        if host is not None:
            address = msgspec.structs.replace(address, host=host)
        if port is not None:
            if not 0 <= port <= 65533:
                raise ConfigError(f"--port: {port} must lie between 0 (any) and 65533: two more follow it")
            address = msgspec.structs.replace(address, port=port + offset if port else 0)
        changes[name] = address
    return msgspec.structs.replace(settings, **changes)


@app.command()
def loadtest(
    address: Annotated[str, typer.Argument(help="Of the server's HTTP front end.")] = "127.0.0.1:8000",
    rate: Rates = None,
    factor: Annotated[float, typer.Option("--load", min=0.0, help="Multiple of the planned rates.")] = 1.0,
    seconds: Seconds = 10.0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Send random requests to a server at given rates, whether or not it keeps up, and report what came back."""
    import uvloop

    from cotenant.cli.client import run

    report = uvloop.run(run(address, rate or (), factor=factor, seconds=seconds, seed=seed, quiet=json))
    if json:
        show_json(report.to_json())
    else:
        console.print(report.table())


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="What `cotenant serve --log FILE` wrote.")],
    json: Json = False,
) -> None:
    """Feed an event log into a fresh dispatcher and say whether it decides the same."""
    from cotenant.runtime.log import replay as run

    result = run(read_bytes(log).splitlines(), str(log))
    ends = [{"model": model, "outcome": outcome, "count": n} for (model, outcome), n in sorted(result.outcomes.items())]
    if json:
        show_json(
            msgspec.json.encode(
                {
                    "events": result.events,
                    "seconds": result.seconds,
                    "outcomes": ends,
                    "identical": not result.difference,
                    "difference": result.difference,
                }
            )
        )
    else:
        console.print(f"{result.events} events in {result.seconds:.3f} s", highlight=False)
        for end in ends:
            console.print(f"  {end['model']}: {end['count']} {end['outcome']}", highlight=False)
        console.print("identical commands" if not result.difference else f"[red]differs[/] at {result.difference}")
    if result.difference:
        raise typer.Exit(1)


app.command()(reproduce)


@app.command()
def devices(json: Json = False) -> None:
    """What this machine has to serve on, what runs there now, and which backends can share it."""
    from cotenant.cli.devices import inspect_machine, machine_view

    machine = inspect_machine()
    if json:
        show_json(machine)
    else:
        console.print(machine_view(machine))


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="Of the server's HTTP front end.")] = "127.0.0.1:8000",
    json: Json = False,
) -> None:
    """What a server serves, on which partitions, and how it goes."""
    from cotenant.cli.client import fetch_status, status_view

    found = fetch_status(address)
    if json:
        show_json(found)
    else:
        console.print(status_view(found))
