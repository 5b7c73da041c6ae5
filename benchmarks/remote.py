"""What does it cost that a device is a node's, and that a node is cut off? One line each.

`python -m benchmarks.remote [--only cost|cut|scale] [--json]`

Nodes are processes in network namespaces of this machine, joined to it by veth pairs; it needs root.

- cost: requests to a model that returns its input, and to one that computes, one at a time or eight at once, in turns
  to a server with workers of its own and to one whose workers are a node's: latency, and processor time of all
  processes.
- cut: two nodes whose workers sleep, and one is cut off under load: until that is noticed, and what was answered in
  time in the ten seconds after, of what a server with one node answers in time at that load.
- scale: what two such nodes serve, and one.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.clusters import FrontEnd, front_end, node_at, now, profile_csv
from benchmarks.harness import SMALL, large, processor_time, show
from benchmarks.network import Host, hosts, missing
from benchmarks.onnx_models import convolutions, identity
from cotenant.core.model import Model
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import Report
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals

LARGE = 600_000  # bytes
ROUNDS = 8
REQUESTS = 400  # a round
SLEEP = 0.02  # seconds of a batch of BATCH rows
BATCH = 8
CAPACITY = BATCH / SLEEP  # requests/s of one node
SLO = 0.2  # seconds
WINDOW = 10.0  # seconds after a cut
LAYERS = 7  # of the model that computes
QUIET = "adapt = false\nwarm_workers = 0\nstandby_workers = 0\n"
SERVED = QUIET + 'model_repository = "models"\nprofiles = "profiles.csv"\nobjective = "rate"\n'


Make = Callable[[Path], object]


def models_in(folder: Path, make: Make) -> None:
    """Write a repository with one model."""
    place = folder / "models" / "model" / "1"
    place.mkdir(parents=True)
    make(place / "model.onnx")


def model_entry(slo: float, rate: float) -> str:
    return f'[[models]]\nname = "model"\nslo = "{slo}s"\nrate = {rate}\n'


# Cost


def cost(name: str, make: Make, body: bytes, headers: dict[str, str], at_once: int = 1) -> None:
    """Compare a server with workers of its own to one with those of a node."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (host,) = stack.enter_context(hosts(1))
        models_in(folder / "local", make)
        models_in(folder / "remote", make)
        for place in ("local", "remote"):
            (folder / place / "profiles.csv").write_text(profile_csv("model", "cpu", {1: 0.001, 8: 0.002}))
        cpu = "[cpu]\ncuts = [100]\n"
        entry = model_entry(2.0, 10.0)
        local = stack.enter_context(front_end(folder / "local", SERVED + cpu + entry))
        node, address = stack.enter_context(node_at(host, folder / "node", QUIET + cpu))
        remote = stack.enter_context(front_end(folder / "remote", SERVED + 'backend = "none"\n' + entry, [address]))
        of = {"local": (local, [local.pid]), "remote": (remote, [remote.pid, node.pid])}
        latencies: dict[str, list[float]] = {place: [] for place in of}
        spent = dict.fromkeys(of, 0.0)
        for number in range(ROUNDS):
            for place, (server, pids) in of.items():
                before = sum(map(processor_time, pids))
                taken = ask(server, body, headers, REQUESTS if number else REQUESTS // 4, at_once)
                if number:  # the first is cold
                    spent[place] += sum(map(processor_time, pids)) - before
                    latencies[place] += taken
    p50 = {place: statistics.median(taken) for place, taken in latencies.items()}
    p99 = {place: statistics.quantiles(taken, n=100)[98] for place, taken in latencies.items()}
    cpu_us = {place: 1e6 * spent[place] / len(latencies[place]) for place in of}
    show(
        f"remote, {name}",
        f"p50 {1e3 * p50['local']:.2f} ms here and {1e3 * p50['remote']:.2f} ms on a node"
        f" (+{1e3 * (p50['remote'] - p50['local']):.2f}), p99 {1e3 * p99['local']:.2f} and {1e3 * p99['remote']:.2f} ms"
        f" (+{1e3 * (p99['remote'] - p99['local']):.2f}); processor time {cpu_us['local']:.0f} and"
        f" {cpu_us['remote']:.0f} us a request ({cpu_us['remote'] / cpu_us['local']:.2f} times)",
        added_p50_ms=1e3 * (p50["remote"] - p50["local"]),
        added_p99_ms=1e3 * (p99["remote"] - p99["local"]),
        local_p50_ms=1e3 * p50["local"],
        local_p99_ms=1e3 * p99["local"],
        processor_time=cpu_us["remote"] / cpu_us["local"],
        local_cpu_us=cpu_us["local"],
        remote_cpu_us=cpu_us["remote"],
    )


def image() -> tuple[bytes, dict[str, str]]:
    """Return a request of one image for `onnx_models.convolutions`."""
    size = 4 * 3 * 32 * 32
    tensor = {"name": "x", "shape": [1, 3, 32, 32], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(size), {"Inference-Header-Content-Length": str(len(head))}


def ask(server: FrontEnd, body: bytes, headers: dict[str, str], count: int, at_once: int = 1) -> list[float]:
    """Send requests, so many at once and then as many again; return how long each took."""
    connections = [http.client.HTTPConnection(server.http, timeout=10) for _ in range(at_once)]
    taken = []
    for _ in range(count // at_once):
        began = time.perf_counter()
        for connection in connections:
            connection.request("POST", "/v2/models/model/infer", body, headers)
        for connection in connections:
            response = connection.getresponse()
            answer = response.read()
            taken.append(time.perf_counter() - began)
            if response.status != 200:
                sys.exit(f"a request was answered by {response.status}: {answer[:200]!r}")
    for connection in connections:
        connection.close()
    return taken


# Nodes whose workers sleep


@contextmanager
def sleeping(count: int, scratch: Path) -> Iterator[tuple[FrontEnd, list[Host]]]:
    """Run a server over nodes whose workers sleep for each batch."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        places = stack.enter_context(hosts(count))
        models_in(folder, partial(identity, max_batch=BATCH))
        (folder / "profiles.csv").write_text(profile_csv("model", "fake", dict.fromkeys(range(1, BATCH + 1), SLEEP)))
        addresses = [
            stack.enter_context(node_at(host, folder / host.name, QUIET + 'backend = "fake"\n'))[1] for host in places
        ]
        settings = SERVED + 'backend = "none"\n' + model_entry(SLO, 100.0)
        yield stack.enter_context(front_end(folder, settings, addresses)), places


async def load(server: FrontEnd, rate: float, seconds: float, seed: int = 0) -> Report:
    """Send Poisson load."""
    models = [Model(name="model", slo=SLO)]
    arrivals = generate_arrivals(Workload.poisson({"model": rate}), seconds, seed)
    return await generate_load(
        f"http://{server.http}", models, {"model": RequestBody(content=SMALL)}, arrivals, seconds
    )


def scale(scratch: Path) -> None:
    """Compare what two nodes serve to what one does, at more load than either takes."""
    goodput = {}
    for count in (1, 2):
        with sleeping(count, scratch) as (server, _):
            (row,) = uvloop.run(load(server, 1.25 * count * CAPACITY, 8.0)).models
            goodput[count] = row.goodput
    show(
        "remote, one and two nodes",
        f"one serves {goodput[1]:.0f} requests/s in time, two {goodput[2]:.0f}: {goodput[2] / goodput[1]:.2f} times",
        one=goodput[1],
        two=goodput[2],
        factor=goodput[2] / goodput[1],
    )


def cut(scratch: Path, share: float) -> None:
    """Cut one of two nodes off. share: of the capacity of one node, that is offered."""

    with sleeping(1, scratch) as (server, _):
        (left,) = uvloop.run(load(server, share * CAPACITY, WINDOW, seed=1)).models

    async def scenario(server: FrontEnd, victim: Host) -> tuple[Report, float | None]:
        await load(server, share * CAPACITY, 4.0)
        running = asyncio.ensure_future(load(server, share * CAPACITY, WINDOW, seed=1))
        await asyncio.sleep(0.05)
        at = now()
        victim.cut()
        report = await running
        seen = server.cut_seen("node-b")
        return report, None if seen is None else (seen - at).total_seconds()

    with sleeping(2, scratch) as (server, (_, victim)):
        report, noticed = uvloop.run(scenario(server, victim))
    (row,) = report.models
    words = "not noticed" if noticed is None else f"noticed after {noticed:.2f} s"
    show(
        f"remote, a node cut off at {100 * share:.0f} % of what one serves",
        f"{words}; in the {WINDOW:.0f} s after, {row.goodput:.0f} of {row.offered:.0f} requests/s were answered in"
        f" time, {100 * row.goodput / left.goodput:.1f} % of the {left.goodput:.0f} that one node alone does;"
        f" {row.outcomes}",
        noticed_s=-1.0 if noticed is None else noticed,
        offered=row.offered,
        goodput=row.goodput,
        one_node=left.goodput,
        of_possible=row.goodput / left.goodput,
        failed=row.outcomes.get("failed", 0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "cut", "scale"))
    parser.add_argument("--json", action="store_true", help="Print figures as JSON.")
    only = parser.parse_args().only
    if why := missing():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as name:
        if only in (None, "cost"):
            cost("small requests", identity, SMALL, {})
            cost("small requests, eight at once", identity, SMALL, {}, at_once=8)
            cost("600 kB requests", partial(identity, width=LARGE // 4), *large(LARGE))
            cost("requests that compute", partial(convolutions, layers=LAYERS), *image())
        if only in (None, "scale"):
            scale(Path(name))
        if only in (None, "cut"):
            for share in (0.7, 1.4):
                cut(Path(name), share)


if __name__ == "__main__":
    main()
