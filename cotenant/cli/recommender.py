"""Recommend shares by what was measured until interrupted: `cotenant recommender`."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from cotenant.app.access import grpc_tls, read_access
from cotenant.cli.loading import read_bytes
from cotenant.cli.options import (
    Json,
    Kubeconfig,
    ServiceCertificate,
    ServiceKey,
    ServiceLogFormat,
    ServiceLogLevel,
    tls_files,
)
from cotenant.cli.output import console, set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.config.settings import AccessSettings
from cotenant.errors import ConfigError, StateConflictError
from cotenant.k8s.client import connected
from cotenant.k8s.recommender.matrices import PROFILES, SAMPLES, Matrices
from cotenant.k8s.recommender.service import RecommenderService
from cotenant.k8s.recommender.state import ConfigMapStore, StateStore, redis_store

logger = logging.getLogger(__name__)

GRACE = 5.0  # seconds for calls in flight when it stops
KEY = "cotenant-recommender"  # of the state in Redis


def recommender(
    profiles: Annotated[
        Path | None, typer.Option("--profiles", help="Initial profiles (CSV file). Default: those in --state.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option("--samples", help="Initial samples of co-located runs (CSV file).")
    ] = None,
    predictor: Annotated[
        str, typer.Option("--predictor", help="Predictor to fit; svd is the NTUA thesis' collaborative filter.")
    ] = "svd",
    state: Annotated[
        str | None,
        typer.Option("--state", help="Store for what is learnt: configmap:NAME or redis://HOST:PORT/0. Default: none."),
    ] = None,
    kubeconfig: Kubeconfig = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="gRPC port.")] = 9003,
    certificate: ServiceCertificate = None,
    key: ServiceKey = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File of the tokens accepted from callers. Without it, anyone may call."),
    ] = None,
    log_level: ServiceLogLevel = "info",
    log_format: ServiceLogFormat = "text",
    json: Json = False,
) -> None:
    """Predict over gRPC, from measurements, the throughput of models alone and co-located, until Ctrl-C."""
    access = tls_files(certificate, key)
    set_up_log(log_level, log_format, access=False)
    given: dict[str, str] = {}
    for name, path in ((PROFILES, profiles), (SAMPLES, samples)):
        if path is not None:
            given[name] = read_bytes(path).decode("utf-8", "replace")
    if token_file is not None:
        access = msgspec.structs.replace(access, tokens={"infer": token_file})
    uvloop.run(_serve(given, predictor, state, kubeconfig, (host, port), access, json=json))


async def _serve(
    given: dict[str, str],
    predictor: str,
    state: str | None,
    kubeconfig: Path | None,
    address: tuple[str, int],
    access: AccessSettings,
    *,
    json: bool,
) -> None:
    async with until_terminated() as stopping, AsyncExitStack() as stack:
        store = None if state is None else await _open(stack, state, kubeconfig)
        matrices, version = await _begin(given, predictor, store)
        listener = RecommenderService(matrices, store, version).listener(grpc_tls(access), read_access(access))
        host, _ = address
        port = await listener.listen(*address)
        stack.push_async_callback(listener.stop, GRACE)
        if json:
            show_json({"address": f"{host}:{port}"})
        else:
            console.print(
                f"recommender at {host}:{port}: {len(matrices.profiles)} profiles, {len(matrices.samples)} samples"
            )
        await stopping.wait()


async def _open(stack: AsyncExitStack, state: str, kubeconfig: Path | None) -> StateStore:
    kind, _, rest = state.partition(":")
    if kind == "configmap" and rest:
        return ConfigMapStore(await stack.enter_async_context(connected(None, kubeconfig)), rest)
    if kind in ("redis", "rediss", "unix"):
        return await stack.enter_async_context(redis_store(state, KEY))
    raise ConfigError(f"--state: {state!r} is not a store; write configmap:NAME or redis://HOST:PORT/0")


async def _begin(given: dict[str, str], predictor: str, store: StateStore | None) -> tuple[Matrices, str]:
    """Return what is known at the start: what is kept, or else what is given, which is then kept."""
    if store is not None:
        kept = await store.read()
        if kept.texts:
            if given:
                logger.info("going on with what is kept; --profiles and --samples are for an empty --state")
            return Matrices.read(kept.texts, predictor), kept.version
    if PROFILES not in given:
        raise ConfigError("nothing to recommend by: name a file with --profiles, or a --state that has some")
    matrices = Matrices.read(given, predictor)
    if store is None:
        return matrices, ""
    try:
        return matrices, await store.write(matrices.texts(), "")
    except StateConflictError:
        return await _begin(given, predictor, store)
