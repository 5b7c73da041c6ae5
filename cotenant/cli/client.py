"""What commands ask of a running server: its status, and answers under load."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape

from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.output import console
from cotenant.cli.rates import chosen_rates
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.core.units import show_memory, show_share
from cotenant.errors import ConfigError, FailedError
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.live.status import Status
from cotenant.measure.plan_drawing import plan_bars
from cotenant.measure.report import Report
from cotenant.measure.table import table
from cotenant.worker.repository import Config, Entry, sample_inputs
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals

TIMEOUT = 10.0
LENGTH = "Inference-Header-Content-Length"


def fetch(address: str, path: str) -> bytes:
    """The body of a GET. Raises ConfigError where nothing answers, or not as it should."""
    host = address.removeprefix("http://").rstrip("/")
    try:
        with closing(http.client.HTTPConnection(host, timeout=TIMEOUT)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(f"no server answers at {address!r}: {error}; start one with `cotenant serve`") from None
    if response.status != 200:
        raise ConfigError(
            f"{address}{path} answers {response.status} {response.reason}; is it a server of this version?"
        )
    return body


def fetch_status(address: str) -> Status:
    try:
        return msgspec.json.decode(fetch(address, "/cotenant/status"), type=Status)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{address} answers with something that is no status: {error}") from None


def status_view(status: Status) -> RenderableType:
    """Models and workers as tables, the plan as bars."""
    plan = Plan.from_json(bytes(status.plan))
    numbers = (">target", ">planned/s", ">served", ">mean", ">in time")
    models = table("models", "model", "state", *numbers, "other ends")
    for row in status.rows(plan):
        models.add_row(*(escape(cell) for cell in row))
    title = f"partitions; shares are held by {status.isolation}"
    held = (">share", ">used", ">memory", ">restarts")
    workers = table(title, "partition", "worker", *held, "models", "last death")
    for worker in status.workers:
        used = "-" if worker.used_share is None else show_share(round(worker.used_share))
        workers.add_row(
            worker.lane,
            worker.state,
            show_share(worker.share),
            f"[red]{used}[/]" if worker.over_share else used,
            show_memory(worker.memory),
            str(worker.restarts),
            escape(", ".join(worker.models)),
            escape(worker.reason),
        )
    return Group(models, plan_bars(plan), workers)


async def run(address: str, rates: Sequence[str], *, factor: float, seconds: float, seed: int, quiet: bool) -> Report:
    """Open-loop Poisson load on the models of a server, at `factor` times the planned rates or the ones given."""
    status = await asyncio.to_thread(fetch_status, address)
    wanted = chosen_rates(status.planned, rates, factor)
    models = [Model(name=name, slo=status.targets[name]) for name, rate in wanted.items() if rate > 0]
    if not models:
        raise ConfigError("no model has a rate above 0; give some with --rate MODEL=REQUESTS_PER_SECOND")
    bodies = await bodies_for(address, models, seed)
    return await under_load(address, models, bodies, wanted, seconds=seconds, seed=seed, quiet=quiet)


async def under_load(
    address: str,
    models: Sequence[Model],
    bodies: Mapping[str, RequestBody],
    rates: Mapping[str, float],
    *,
    seconds: float,
    seed: int,
    quiet: bool,
) -> Report:
    """With a live table, unless `quiet`."""
    asked = generate_arrivals(Workload.poisson({model.name: rates[model.name] for model in models}), seconds, seed)
    tune_for_latency()
    if quiet:
        return await generate_load(address, models, bodies, asked, seconds)
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(report: Report) -> None:
            live.update(report.table(), refresh=True)

        return await generate_load(address, models, bodies, asked, seconds, on_tick=show)


def body_of(inputs: Sequence[Tensor]) -> RequestBody:
    """An infer request in the protocol's binary form, which asks for binary outputs."""
    described = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in inputs
    ]
    head = msgspec.json.encode({"inputs": described, "parameters": {"binary_data_output": True}})
    content = b"".join([head, *(tensor.data for tensor in inputs)])
    return RequestBody(content=content, headers={LENGTH: str(len(head))})


def infer(address: str, model: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of one request. Raises FailedError with what the server says where it does not answer."""
    body = body_of(inputs)
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request("POST", f"/v2/models/{quote(model, safe='')}/infer", body.content, dict(body.headers))
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise FailedError(f"no answer from {address}: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise FailedError(f"{response.status}: {answer.decode(errors='replace')}")
    position = int(response.headers[LENGTH])
    outputs = []
    for given in msgspec.json.decode(answer[:position])["outputs"]:
        end = position + given["parameters"]["binary_data_size"]
        outputs.append(Tensor(given["name"], given["datatype"], tuple(given["shape"]), answer[position:end]))
        position = end
    return tuple(outputs)


async def bodies_for(address: str, models: Iterable[Model], seed: int) -> dict[str, RequestBody]:
    """By model."""
    rng = np.random.default_rng(seed)
    return {model.name: await asyncio.to_thread(body_for, address, model.name, rng) for model in models}


def body_for(address: str, model: str, rng: np.random.Generator) -> RequestBody:
    """Random inputs of one row, in the shapes that the server says."""
    place = f"/v2/models/{quote(model, safe='')}"
    metadata: dict[str, Any] = msgspec.json.decode(fetch(address, place))
    config: dict[str, Any] = msgspec.json.decode(fetch(address, f"{place}/config"))
    info = ModelInfo(
        name=model,
        version=metadata["versions"][-1],
        platform=metadata["platform"],
        inputs=tuple(TensorSpec(it["name"], it["datatype"], tuple(it["shape"])) for it in metadata["inputs"]),
        outputs=(),
        max_batch_size=config["max_batch_size"],
    )
    warm_up = msgspec.convert({"model_warmup": config.get("model_warmup", [])}, Config)
    entry = Entry(name=model, folder=Path(model), path=Path(model), config=warm_up)
    return body_of(sample_inputs(entry, info, 1, rng))
