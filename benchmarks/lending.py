"""What does lending idle shares of the processor gain, and which models does it slow?

`python -m benchmarks.lending [--model-repository DIR] [--models NAME …] [--seconds S] [--rounds N] [--scale X]
[--json]`

One plan of the demo's models is served twice, with shares that are lent and with ceilings; both servers are up all the
time, and take turns:

- *idle*: one caller at a time, one model after the other, back to back and after rests; p50 over that of plain ONNX
  Runtime with as many threads, the same inputs and the same rest before each run. Beside it stand what a request costs
  that runs nothing (*http*), and one that is only passed on to a process that runs the model, by a program that does
  nothing else (*relay*): the least for a server whose models run in processes of their own;
- *planned*: Poisson arrivals, from a process of its own, at the planned rates of all models, times `--scale`;
- *greedy*: the same, and the model with the largest batch time is asked for five times its planned rate, which is more
  than its share can do. It always has work; what counts is how the others fare.

Figures of one machine; only ratios between turns mean anything beside other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnxruntime
import uvloop

from benchmarks.adaptive import Segment, send
from cotenant.app.backend import create_backend
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.startup import Prepared, prepare_deployment
from cotenant.backends.cpu import Cpu
from cotenant.cli.client import body_of
from cotenant.cli.demo import demo_settings
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.config import Settings, read_settings
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Partition
from cotenant.core.tensor import Tensor
from cotenant.live.deployment import Deployment
from cotenant.measure.report import ModelReport
from cotenant.zoo import DEMO, build_models
from cotenant.zoo.answers import example_request

RESTS = {0.0: 150, 0.01: 60}  # runs of the idle machine, by the seconds before each; 10 ms as while profiling
ROUNDS = 3  # in which they are made, in turns
WARM_UP = 5  # runs of each round that are not counted
GREED = 5.0  # times its planned rate
FACTOR, EXTRA = 1.3, 0.0003  # of plain ONNX Runtime, and seconds, that p50 may take on an idle machine
MODES = {"lent": True, "ceiling": False}


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in seconds, by the share in percent on which the model runs. rest: seconds before each run. kept: within
    the goal."""

    model: str
    rest: float
    share: float
    threads: int
    plain: float
    http: float
    relay: float
    lent: float
    ceiling: float
    kept: bool


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model under load, over all rounds. p99: seconds, the median of the rounds."""

    model: str
    greedy: bool
    attainment: dict[str, float]
    p50: dict[str, float]
    p99: dict[str, float]


class Assembly(NamedTuple):
    """What is served, and how."""

    settings: Settings
    deployment: Deployment


class Result(msgspec.Struct, frozen=True, kw_only=True):
    idle: tuple[Idle, ...]
    planned: tuple[Loaded, ...]
    greedy: tuple[Loaded, ...]


async def measure(settings: Settings, names: Sequence[str], seconds: float, rounds: int, scale: float) -> Result:
    deployment = (await prepare_deployment(DeploymentBuilder(settings, create_backend(settings)), names)).deployment
    assembly = Assembly(settings, deployment)

    async def prepared(builder: DeploymentBuilder) -> Prepared:
        return Prepared(deployment)

    plan = assembly.deployment.plan
    placed = [name for name in names if plan.rate(name)]
    examples = {name: example_request(name, np.random.default_rng(0)).requests[0] for name in placed}
    async with AsyncExitStack() as stack:
        addresses = {}
        for mode, lend in MODES.items():
            own = Cpu(enforcement=settings.enforcement, reserve=settings.reserve, lend=lend)
            server = await stack.enter_async_context(running(settings, own, prepared))
            addresses[mode] = server.addresses.http
        tune_for_latency()
        idle = [row for name in placed for row in await _idle(name, assembly, addresses, examples[name])]
        rates = {name: plan.rate(name) * scale for name in placed}
        heaviest = max(plan.placements(), key=lambda place: place[2].latency)[2].model
        greedy = rates | {heaviest: GREED * plan.rate(heaviest)}
        return Result(
            idle=tuple(idle),
            planned=await _loaded(addresses, rates, "", seconds, rounds),
            greedy=await _loaded(addresses, greedy, heaviest, seconds, rounds),
        )


async def _idle(
    name: str, assembly: Assembly, addresses: Mapping[str, str], inputs: Sequence[Tensor]
) -> tuple[Idle, ...]:
    partition = _largest_partition(name, assembly)
    threads = Cpu(reserve=assembly.settings.reserve).open(LaneId(DeviceId("cpu"), 0), partition.share).threads
    path = assembly.deployment.offered[name].entry.path
    found: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    async with _relay(name, path, threads) as relay:
        for _ in range(ROUNDS):
            for rest in RESTS:
                for mode, address in ({**addresses, "relay": relay}).items():
                    found[mode, rest] += await _client(name, address, inputs, rest)
                found["http", rest] += await _client("", next(iter(addresses.values())), inputs, rest)
                found["plain", rest] += await asyncio.to_thread(_plain, path, threads, inputs, rest)
    rows = []
    for rest in RESTS:
        plain, http, relayed, lent, ceiling = (
            statistics.median(found[key, rest]) for key in ("plain", "http", "relay", "lent", "ceiling")
        )
        rows.append(
            Idle(
                model=name,
                rest=rest,
                share=partition.share / 10,
                threads=threads,
                plain=plain,
                http=http,
                relay=relayed,
                lent=lent,
                ceiling=ceiling,
                kept=lent <= FACTOR * plain + EXTRA,
            )
        )
    return tuple(rows)


@asynccontextmanager
async def _relay(name: str, path: Path, threads: int) -> AsyncIterator[str]:
    """Run a relay to a process with the model; yield its address."""
    relay = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.relay", name, str(path), str(threads)), stdout=asyncio.subprocess.PIPE
    )
    assert relay.stdout is not None
    try:
        yield (await relay.stdout.readline()).decode().strip()
    finally:
        relay.terminate()
        await relay.wait()


def _largest_partition(name: str, assembly: Assembly) -> Partition:
    """The partition that runs a model where all lanes are idle: the one with the shortest batch of one."""
    return max(
        (
            partition
            for device in assembly.deployment.plan.devices
            for partition in device.partitions
            if any(placed.model == name for placed in partition.placements)
        ),
        key=lambda partition: partition.share,
    )


def _plain(path: Path, threads: int, inputs: Sequence[Tensor], rest: float) -> list[float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = {tensor.name: tensor.array() for tensor in inputs}
    seconds = []
    for _ in range(RESTS[rest] // ROUNDS + WARM_UP):
        if rest:
            time.sleep(rest)
        begun = time.perf_counter()
        session.run(None, arrays)
        seconds.append(time.perf_counter() - begun)
    return seconds[WARM_UP:]


async def _client(name: str, address: str, inputs: Sequence[Tensor], rest: float) -> list[float]:
    """Return the latencies that a program of its own sees that asks again after each answer and a rest. Without a name
    it asks whether the server is alive."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.lending", "--client", address, str(rest)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    body = body_of(inputs)
    lines = [f"POST /v2/models/{name}/infer HTTP/1.1" if name else "GET /v2/health/live HTTP/1.1", f"Host: {address}"]
    if name:
        lines += [f"{key}: {value}" for key, value in body.headers.items()] + [f"Content-Length: {len(body.content)}"]
    head = "\r\n".join([*lines, "", ""]).encode()
    printed, _ = await client.communicate(head + (body.content if name else b""))
    if client.returncode:
        sys.exit(f"{name or 'live'}: {printed.decode()}")
    seconds: list[float] = json.loads(printed)
    return seconds


def _ask(address: str, rest: float) -> None:
    """Send what standard input holds again and again; over a bare socket, so that little of the time is this
    program's own."""
    host, port = address.rsplit(":", 1)
    request = sys.stdin.buffer.read()
    seconds = []
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(RESTS[rest] // ROUNDS + WARM_UP):
            if rest:
                time.sleep(rest)
            begun = time.perf_counter()
            connection.sendall(request)
            answer = _response(connection)
            seconds.append(time.perf_counter() - begun)
            if not answer.startswith(b"HTTP/1.1 200"):
                sys.exit(answer.decode(errors="replace"))
    print(json.dumps(seconds[WARM_UP:]))


def _response(connection: socket.socket) -> bytes:
    """Receive one response, with its body."""
    data, end, whole = b"", -1, 0
    while end < 0 or len(data) < whole:
        received = connection.recv(1 << 20)
        if not received:
            sys.exit("the server closed the connection")
        data += received
        if end < 0 and (end := data.find(b"\r\n\r\n")) >= 0:
            (length,) = re.findall(rb"(?im)^content-length: *(\d+)", data[:end])
            whole = end + 4 + int(length)
    return data


async def _loaded(
    addresses: Mapping[str, str],
    rates: Mapping[str, float],
    greedy: str,
    seconds: float,
    rounds: int,
) -> tuple[Loaded, ...]:
    reports: dict[str, list[Sequence[ModelReport]]] = {mode: [] for mode in MODES}
    for seed in range(rounds):
        for mode in list(MODES) if seed % 2 == 0 else list(MODES)[::-1]:
            end = (await send(addresses[mode], [Segment(seconds, dict(rates))], seed))[-1]
            reports[mode].append(end.models)
    return tuple(
        Loaded(
            model=name,
            greedy=name == greedy,
            attainment={
                mode: _mean([1 - row.missed / row.stayed for row in _rows(of, name) if row.stayed])
                for mode, of in reports.items()
            },
            p50={mode: _median([row.p50 for row in _rows(of, name)]) for mode, of in reports.items()},
            p99={mode: _median([row.p99 for row in _rows(of, name)]) for mode, of in reports.items()},
        )
        for name in rates
    )


def _rows(reports: Sequence[Sequence[ModelReport]], name: str) -> list[ModelReport]:
    return [row for rows in reports for row in rows if row.model == name]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else float("nan")


def _show(result: Result) -> None:
    print("idle machine, p50 in ms")
    for it in result.idle:
        print(
            f"{it.model:<16} {it.share:5.1f} %, {it.threads} threads, rests of {it.rest * 1e3:2.0f} ms: "
            f"plain {it.plain * 1e3:7.3f}  lent "
            f"{it.lent * 1e3:7.3f} ({it.lent / it.plain:.2f} ×)  ceiling {it.ceiling * 1e3:7.3f} "
            f"({it.ceiling / it.plain:.2f} ×)  http {it.http * 1e3:.3f}  "
            f"relay {it.relay * 1e3:.3f}  {'kept' if it.kept else 'MISSED'}"
        )
    for what, rows in (("planned rates", result.planned), ("beside a greedy model", result.greedy)):
        print(what)
        for row in rows:
            print(
                f"{row.model:<16} attainment {row.attainment['lent'] * 100:6.2f} % lent, "
                f"{row.attainment['ceiling'] * 100:6.2f} % not; lent over not: "
                f"p50 {row.p50['lent'] / row.p50['ceiling']:.2f}, p99 {row.p99['lent'] / row.p99['ceiling']:.2f}"
                f"{'  (greedy)' if row.greedy else ''}"
            )


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        _ask(sys.argv[2], float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-repository", type=Path, default=Path("models"))
    parser.add_argument("--models", nargs="+", default=list(DEMO))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    build_models(args.model_repository, args.models)
    settings = demo_settings(
        msgspec.structs.replace(
            read_settings(), model_repository=args.model_repository, http_port=0, grpc_port=0, metrics_port=0
        )
    )
    settings = msgspec.structs.replace(settings, models=tuple(m for m in settings.models if m.name in args.models))
    result = uvloop.run(measure(settings, args.models, args.seconds, args.rounds, args.scale))
    if args.json:
        print(msgspec.json.encode(result).decode())
    else:
        _show(result)


if __name__ == "__main__":
    main()
