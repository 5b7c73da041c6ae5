"""Scale instances by HetSev until interrupted: `cotenant scaling-controller`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.loading import read_bytes
from cotenant.cli.options import (
    CaFile,
    ServiceLogFormat,
    ServiceLogLevel,
    TokenFile,
    duration_of_at_least,
    parse_duration,
)
from cotenant.cli.output import set_up_log
from cotenant.cli.serve import until_terminated
from cotenant.config.problem import read_problem
from cotenant.control.scaling.hetsev import GreedyScaling, LeastCostScaling
from cotenant.control.scaling.provisioning import InstancePolicy, InstanceScaler
from cotenant.core.units import parse_share, show_share
from cotenant.errors import ConfigError
from cotenant.k8s.background import beside
from cotenant.k8s.scaling.client import InstanceClient
from cotenant.k8s.scaling.controller import INTERVAL, ScalingController
from cotenant.k8s.scaling.observed import LATENCIES, RATES, WINDOW, MetricRepository
from cotenant.k8s.scaling.prometheus import prometheus
from cotenant.live.access import is_local
from cotenant.planners import Problem

logger = logging.getLogger(__name__)


class PolicyName(StrEnum):
    """greedy: HetSev's heuristic. program: its integer program."""

    GREEDY = "greedy"
    PROGRAM = "program"


def scaling_controller(
    problem: Annotated[
        Path,
        typer.Argument(
            metavar="PROBLEM",
            help="Problem file (TOML): models with objectives and the rates that they begin with, kinds of devices "
            "with prices and counts, profiles.",
        ),
    ],
    metrics: Annotated[
        str, typer.Option("--prometheus", metavar="URL", help="URL of the Prometheus server to read rates from.")
    ] = "http://127.0.0.1:9090",
    instances: Annotated[
        str, typer.Option("--instances", metavar="HOST:PORT", help="Address of the instance controller.")
    ] = "127.0.0.1:9004",
    policy: Annotated[
        PolicyName,
        typer.Option("--policy", help="HetSev's heuristic, or its integer program, which also exchanges instances."),
    ] = PolicyName.GREEDY,
    share: Annotated[
        float, typer.Option("--share", metavar="PERCENT", help="Share of a device that each instance gets.")
    ] = 50.0,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", parser=duration_of_at_least(0.1), metavar="DURATION", help="Time between decisions."
        ),
    ] = INTERVAL,
    window: Annotated[
        float,
        typer.Option(
            "--window",
            parser=duration_of_at_least(0.1),
            metavar="DURATION",
            help="Time window over which rates are averaged; at least four scrapes.",
        ),
    ] = WINDOW,
    cool_down: Annotated[
        float,
        typer.Option(
            "--cool-down",
            parser=duration_of_at_least(0.0),
            metavar="DURATION",
            help="How long an instance must be superfluous before it is released (greedy).",
        ),
    ] = 300.0,
    launch: Annotated[
        list[str] | None,
        typer.Option(
            "--launch", metavar="KIND=DURATION", help="Time until an instance on this kind serves; repeat for several."
        ),
    ] = None,
    rate_query: Annotated[
        str,
        typer.Option(
            "--rate-query",
            metavar="PROMQL",
            help="Query for requests/s by label model; $window is --window. Default: metrics of `cotenant serve`.",
            show_default=False,
        ),
    ] = RATES,
    latency_query: Annotated[
        str,
        typer.Option(
            "--latency-query", metavar="PROMQL", help="Query for latency in seconds by label model.", show_default=False
        ),
    ] = LATENCIES,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    prometheus_token_file: Annotated[
        Path | None, typer.Option("--prometheus-token-file", help="File of the token to send to Prometheus.")
    ] = None,
    prometheus_ca_file: Annotated[
        Path | None,
        typer.Option("--prometheus-ca-file", help="CA certificate (PEM) that signed Prometheus', for https://."),
    ] = None,
    insecure_token: Annotated[
        bool,
        typer.Option("--insecure-token", help="Send tokens unencrypted over a network that you trust."),
    ] = False,
    log_level: ServiceLogLevel = "info",
    log_format: ServiceLogFormat = "text",
) -> None:
    """Scale instances of models with HetSev's algorithms, by the rates in Prometheus, until Ctrl-C."""
    set_up_log(log_level, log_format, access=False)
    known = read_problem(problem)
    part = parse_share(share, "--share")
    chosen: InstancePolicy = (
        GreedyScaling(share=part, cool_down=cool_down) if policy is PolicyName.GREEDY else LeastCostScaling(share=part)
    )
    scaler = InstanceScaler(known, chosen, _launch_seconds(launch or (), known))
    _check_capacity(scaler, known, part)
    authority = None if ca_file is None else read_bytes(ca_file)
    if not insecure_token:
        if token_file is not None and authority is None:
            _check_local("--instances", instances, "name who signed its certificate with --ca-file")
        if prometheus_token_file is not None and not metrics.lower().startswith("https://"):
            address = metrics.partition("://")[2].rpartition("@")[2].partition("/")[0]
            _check_local("--prometheus", address, "write https://")

    async def run() -> None:
        client = InstanceClient(instances, authority, token_file)
        try:
            async with (
                until_terminated() as stopping,
                prometheus(metrics, ca_file=prometheus_ca_file, token_file=prometheus_token_file) as source,
            ):
                repository = MetricRepository(source, rates=rate_query, latencies=latency_query, window=window)
                controller = ScalingController(scaler, repository, client, time.monotonic, interval)
                async with beside(controller.run()):
                    await stopping.wait()
        finally:
            await client.close()

    asyncio.run(run())


def _check_local(option: str, address: str, way_out: str) -> None:
    """Raise ConfigError for an address that a token would reach over a network in the clear."""
    if not is_local(address):
        raise ConfigError(
            f"{option}: {address!r}: a token is not sent unencrypted over a network; {way_out}, or set"
            " --insecure-token where the network is yours"
        )


def _launch_seconds(given: Iterable[str], problem: Problem) -> dict[str, float]:
    known = [kind.name for kind in problem.fleet]
    found = {}
    for text in given:
        kind, equals, duration = text.rpartition("=")
        if not equals or kind not in known:
            raise ConfigError(f"--launch {text}: write KIND=DURATION, such as {known[0] if known else 'v100'}=30s")
        try:
            found[kind] = parse_duration(duration)
        except typer.BadParameter as error:
            raise ConfigError(f"--launch {text}: {error.message}") from None
    return found


def _check_capacity(scaler: InstanceScaler, problem: Problem, share: int) -> None:
    """Raise ConfigError for a model of which no instance meets the objective."""
    for model in problem.models:
        if not any(scaler.capacity(model.name, kind.name) for kind in problem.fleet):
            raise ConfigError(
                f"{model.name}: {show_share(share)} of no kind of device meets its objective; give instances a larger"
                " --share, or profile the model on that"
            )
