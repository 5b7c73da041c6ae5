"""Define arguments and options of several commands, spelled as in the settings file and in environment variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cotenant.config.settings import AccessSettings, LogFormat, LogLevel
from cotenant.config.settings import ModelControlMode as ControlModes
from cotenant.core import units
from cotenant.errors import ConfigError
from cotenant.planners import PLANNERS


def parse_duration(text: str | float) -> float:
    """Parse ``10s``, ``500ms``, ``2min`` or a plain number of seconds. Raises typer.BadParameter."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = units.parse_seconds(str(text), "duration")
        except ConfigError as error:
            raise typer.BadParameter(str(error).removeprefix("duration: ")) from None
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a duration; write it as 10s, 2min or a number of seconds")
    return seconds


def duration_of_at_least(least: float) -> Callable[[str | float], float]:
    """Return a parser of durations that rejects those below `least` seconds."""

    def parse(text: str | float) -> float:
        seconds = parse_duration(text)
        if seconds < least:
            raise typer.BadParameter(f"{text!r} is too short; use at least {least:g} s")
        return seconds

    return parse


def complete_planner(incomplete: str) -> list[str]:
    return [name for name in PLANNERS if name.startswith(incomplete)]


def prefer_argument(context: typer.Context, model_repository: Path | None) -> Path | None:
    """Ignore a repository from the environment where an argument names what to read."""
    source = context.get_parameter_source("model_repository")
    file = context.params.get("problem") or context.params.get("settings")
    named = file is not None and ("problem" in context.params or Path(file).is_dir())
    return None if named and source is not None and source.name == "ENVIRONMENT" else model_repository


def tls_files(certificate: Path | None, key: Path | None) -> AccessSettings:
    """Return the settings of a server with this certificate; None: without TLS. Raises ConfigError for one without the
    other."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key go together")
    return AccessSettings(certificate=certificate, key=key)


def _port_option(front_end: str, default: int, what: str) -> Any:
    """Return the option of a front end's port. default: the one of the settings."""
    return typer.Option(
        f"--{front_end}-port",
        metavar="PORT",
        envvar=f"COTENANT_{front_end.upper()}_PORT",
        min=0,
        max=65535,
        help=f"{what}; 0 for any free port. Default: {default}.",
    )


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SettingsFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="SETTINGS",
        envvar="COTENANT_SETTINGS",
        help="Settings file (TOML) or model repository (folder). Default: the models of ./models.",
    ),
]
ProblemFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="PROBLEM", help="Problem file (TOML) or model repository (folder). Default: the models of ./models."
    ),
]
ModelRepository = Annotated[
    Path | None,
    typer.Option(
        "--model-repository",
        "-r",
        envvar="COTENANT_MODEL_REPOSITORY",
        callback=prefer_argument,
        help="Model repository: a folder in Triton's layout.",
    ),
]
ServerSettings = Annotated[
    Path | None,
    typer.Option("--settings", help="Settings file whose models, SLOs and rates are used instead of a problem file."),
]
ModelControlMode = Annotated[
    ControlModes | None,
    typer.Option(
        "--model-control-mode",
        envvar="COTENANT_MODEL_CONTROL_MODE",
        help="How models are loaded and unloaded: explicit (by request), poll (as the repository changes), "
        "kubernetes (as ServedModel resources change) or none. Default: explicit.",
    ),
]
LoadModel = Annotated[
    list[str] | None,
    typer.Option("--load-model", help="Model to load at start; repeat for several. Default: *, all models."),
]
PlannerName = Annotated[
    str | None,
    typer.Option(
        "--planner",
        "-p",
        envvar="COTENANT_PLANNER",
        autocompletion=complete_planner,
        help=f"Planner to use: {', '.join(PLANNERS)}, or an installed one.",
    ),
]
Host = Annotated[
    str | None, typer.Option("--host", envvar="COTENANT_HOST", help="Address to bind to. Default: 127.0.0.1.")
]
HttpPort = Annotated[int | None, _port_option("http", 8000, "HTTP port")]
GrpcPort = Annotated[int | None, _port_option("grpc", 8001, "gRPC port")]
MetricsPort = Annotated[int | None, _port_option("metrics", 8002, "Port of the Prometheus metrics")]
EventLog = Annotated[
    Path | None,
    typer.Option(
        "--event-log", envvar="COTENANT_EVENT_LOG", help="Write an event log to this file, for `cotenant replay`."
    ),
]
StateFileOption = Annotated[
    Path | None,
    typer.Option("--state", envvar="COTENANT_STATE", help="SQLite file of the state kept across restarts."),
]
Adapt = Annotated[
    bool | None,
    typer.Option(
        "--adapt/--no-adapt",
        envvar="COTENANT_ADAPT",
        help="Replan while serving, for the observed rates and latencies. Default: yes.",
    ),
]
MaxQueueDelay = Annotated[
    float | None,
    typer.Option(
        "--max-queue-delay",
        envvar="COTENANT_MAX_QUEUE_DELAY",
        parser=parse_duration,
        metavar="DURATION",
        help="How long a batch that is not full may wait, for models that set no delay of their own. Default: 0.",
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", envvar="COTENANT_LOG_LEVEL", help="Lowest severity to log. Default: warning."),
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", envvar="COTENANT_LOG_FORMAT", help="Format of the log. Default: text."),
]
ServiceLogLevel = Annotated[LogLevel, typer.Option(envvar="COTENANT_LOG_LEVEL", help="Lowest severity to log.")]
ServiceLogFormat = Annotated[LogFormat, typer.Option(envvar="COTENANT_LOG_FORMAT", help="Format of the log.")]
AccessLog = Annotated[
    bool | None,
    typer.Option(
        "--access-log/--no-access-log",
        envvar="COTENANT_ACCESS_LOG",
        help="Log every request, over HTTP and gRPC. Default: no.",
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-endpoint",
        envvar="COTENANT_OTLP_ENDPOINT",
        help="OpenTelemetry collector to export traces to, such as http://localhost:4318.",
    ),
]
ServerAddress = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="COTENANT_ADDRESS",
        metavar="HOST:PORT",
        help="HTTP address of the server; https://HOST:PORT for TLS.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="COTENANT_TOKEN_FILE", help="File of the token to send to the server."),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", envvar="COTENANT_CA_FILE", help="CA certificate (PEM) that signed the server's, for https://."
    ),
]
ServiceCertificate = Annotated[
    Path | None, typer.Option("--certificate", help="Certificate (PEM) to serve with; needs --key.")
]
ServiceKey = Annotated[Path | None, typer.Option("--key", help="Private key (PEM) of --certificate.")]
Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Kubeconfig file. Default: the pod's service account, else KUBECONFIG."),
]
LOCAL = "127.0.0.1:8000"  # a server with default settings
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        metavar="poisson|even",
        help="Leave room for random arrivals (poisson), or plan for evenly spaced requests (even).",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        parser=duration_of_at_least(0.01),
        metavar="DURATION",
        help="Processor time of each search of geometry, or training of inss; other planners ignore it. Default: 5s.",
    ),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this .svg, .png or .pdf file.")]
Duration = Annotated[
    float,
    typer.Option(
        "--duration",
        "-d",
        parser=duration_of_at_least(0.1),
        metavar="DURATION",
        help="Duration of the load: 10s, 2min, or seconds.",
    ),
]
Scale = Annotated[float, typer.Option("--scale", min=0.0, help="Multiple of the rates to send.")]
Lend = Annotated[
    bool,
    typer.Option("--lend", help="Lend idle CPU share, as a server does. Default: shares are ceilings."),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
Rates = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        metavar="MODEL=RATE",
        help="Requests/s of a model; repeat for several. Other models then get no requests.",
    ),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        help="Workload file. TOML: arrival processes, traces, failures. CSV: a trace with a column `model`.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of worker processes.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Number of runs, with consecutive seeds from --seed.")]
