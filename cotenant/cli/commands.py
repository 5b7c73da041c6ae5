"""List the commands. Each is a function of a module of its own, which is imported when the command is used: `--help`
and short commands do not wait for what long ones need."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cotenant import __version__
from cotenant.core.units import show_seconds

# Name → what it does, and the function or group of commands that does it. A test holds the words against its docstring.
COMMANDS = {
    "demo": (
        "Build, profile, plan and serve example models, send requests and load, and print a report.",
        "cotenant.cli.demo:demo",
    ),
    "examples": (
        "Build example models: the papers' architectures, small trained models, and a sentence embedder.",
        "cotenant.cli.examples:examples",
    ),
    "profile": (
        "Profile the models of a repository over batch size and share of a device. Results are cached.",
        "cotenant.cli.profile:profile",
    ),
    "characterise": (
        "Run MLPerf's scenarios on models alone and co-located over shares of a device; write the matrices that the "
        "collaborative filter learns from.",
        "cotenant.cli.characterise:characterise",
    ),
    "plan": (
        "Plan shares, batch sizes and placement of models, and predict SLO attainment.",
        "cotenant.cli.plan:plan",
    ),
    "compare": (
        "Compare planners on the same problems: distance to a proven bound, attainment in simulation, work and churn.",
        "cotenant.cli.compare_all:compare",
    ),
    "simulate": (
        "Simulate a plan under random arrivals or a workload: the server's dispatcher in virtual time.",
        "cotenant.cli.simulate:simulate",
    ),
    "capacity": (
        "Find the largest multiple of the rates that a plan sustains in the simulator, or size the fleet for growth.",
        "cotenant.cli.capacity:capacity",
    ),
    "validate": (
        "Validate the simulator against a live server: same plan, same arrivals. Needs an otherwise idle machine.",
        "cotenant.cli.validate:validate",
    ),
    "colocate": (
        "Choose models to co-locate with a target for the highest total throughput.",
        "cotenant.cli.colocate:colocate",
    ),
    "fit": (
        "Fit an interference predictor to samples of co-located runs, or compare predictors on them.",
        "cotenant.cli.fit:fit",
    ),
    "train": (
        "Train the policy of planner inss or inss-plus on a problem. Takes minutes on one core.",
        "cotenant.cli.train:train",
    ),
    "serve": ("Serve a model repository over HTTP and gRPC until Ctrl-C.", "cotenant.cli.serve:serve"),
    "node": (
        "Offer this machine's devices to one server at a time, over the network, until Ctrl-C.",
        "cotenant.cli.node:node",
    ),
    "loadtest": (
        "Send open-loop random load to a server, and report throughput, latency and SLO attainment.",
        "cotenant.cli.loadtest:loadtest",
    ),
    "status": (
        "Show a server's models, partitions, workers and SLO attainment. With --watch --json: one line per second.",
        "cotenant.cli.status:status",
    ),
    "models": ("List, load and unload the models of a running server.", "cotenant.cli.models:app"),
    "jobs": (
        "Submit, list, follow, pause, resume and cancel the best-effort jobs of a running server.",
        "cotenant.cli.jobs:app",
    ),
    "infer": ("Send one inference request and print the outputs.", "cotenant.cli.infer:infer"),
    "reload": (
        "Make a server reload its configuration and roll out the new plan. Waits until that is done.",
        "cotenant.cli.reload:reload",
    ),
    "replay": (
        "Replay an event log through a fresh dispatcher and a fresh controller, and compare their decisions.",
        "cotenant.cli.replay:replay",
    ),
    "reproduce": (
        "Reproduce figures of the papers next to the published numbers. Needs a checkout and its data.",
        "cotenant.cli.reproduce:reproduce",
    ),
    "dra": (
        "Allocate shares of devices in a Kubernetes cluster by Dynamic Resource Allocation.",
        "cotenant.cli.dra:app",
    ),
    "endpoint-picker": (
        "Pick servers for Envoy's requests, by the endpoint-picker protocol of the Gateway API, until Ctrl-C.",
        "cotenant.cli.endpoint_picker:endpoint_picker",
    ),
    "device-exporter": (
        "Export metrics of this node's GPUs: partitions, users and utilisation, until Ctrl-C.",
        "cotenant.cli.device_exporter:device_exporter",
    ),
    "recommender": (
        "Predict over gRPC, from measurements, the throughput of models alone and co-located, until Ctrl-C.",
        "cotenant.cli.recommender:recommender",
    ),
    "scaling-controller": (
        "Scale instances of models with HetSev's algorithms, by the rates in Prometheus, until Ctrl-C.",
        "cotenant.cli.scaling_controller:scaling_controller",
    ),
    "instance-controller": (
        "Create, delete and list pods that run instances of models, for a scaling controller, until Ctrl-C.",
        "cotenant.cli.instance_controller:instance_controller",
    ),
    "share-controller": (
        "Assign shares of devices to pods that request them by annotations, with any planner, until Ctrl-C.",
        "cotenant.cli.share_controller:share_controller",
    ),
    "devices": (
        "Show the devices of this machine, what runs on them, and which backends can partition them.",
        "cotenant.cli.devices:devices",
    ),
}


class LazyCommand(TyperCommand):
    """Stand for a command that is imported once it is used."""

    def __init__(self, name: str, help: str, place: str) -> None:
        super().__init__(name, help=help)
        self._place = place

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command; from here on it is that one."""
        return load_command(str(self.name), self._place).make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """Know all commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> LazyCommand | None:
        if cmd_name not in COMMANDS:
            return None
        summary, place = COMMANDS[cmd_name]
        return LazyCommand(cmd_name, summary, place)


def load_command(name: str, place: str) -> Any:
    """Import a command of typer. place: its module, and the function or group there."""
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        found.command(name)(function)
    command = typer.main.get_command(found)
    command.name = name
    _write_durations(command)
    return command


def _write_durations(command: Any) -> None:
    """Give defaults of durations a unit, for the help: 15.0 → ``15s``. Their parser reads them as any other."""
    for each in getattr(command, "commands", {}).values():
        _write_durations(each)
    for option in command.params:
        if option.metavar == "DURATION" and isinstance(option.default, float):
            option.default = show_seconds(option.default).replace(" ", "")


app = typer.Typer(
    name="cotenant",
    cls=Commands,
    help="Serve many machine-learning models on few shared accelerators, each within its latency SLO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"cotenant {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    pass
