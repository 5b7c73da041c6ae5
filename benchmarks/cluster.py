"""Show one server over two machines: `make cluster`, or `python -m benchmarks.cluster [--requests N] [--json]`.

Two nodes run in network namespaces of this machine, with trained models that the server sends them and measures there.
Callers ask about rows that the models were not trained on. One node is killed under load; after a while it is started
again. Every answer is held against what the model says here. It needs root, and exits with 1 if a request was lost or
an answer wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.clusters import FrontEnd, front_end, node_at
from benchmarks.network import hosts, missing
from cotenant.zoo import build_models
from cotenant.zoo.trained import load_dataset

MODELS = {"digits": "image", "cancer": "features"}  # and what their input is called
SETTINGS = 'backend = "none"\nmodel_repository = "models"\nobjective = "rate"\nadapt = false\n'
# Nodes give so little of this machine to models that a plan takes both, and none is cut, so that both have all models.
NODE = 'warm_workers = 0\n[cpu]\nreserve = "96%"\ncuts = [100]\n'
SLO = 1.0  # seconds: time enough to be tried again elsewhere
CALLERS = 4
PAUSE = 0.01  # seconds between two requests of a caller
PATIENCE = 60.0  # seconds for a node to be seen


class Callers:
    """Ask a server all the time, and hold the answers against `expected`. ended: requests by how they ended."""

    def __init__(self, server: FrontEnd, repository: Path) -> None:
        self.ended: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()  # rightly, by model
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._rows = {name: load_dataset(name).held_out_x for name in MODELS}
        self._expected = {name: outputs(repository / name, MODELS[name], self._rows[name]) for name in MODELS}
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CALLERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Wait until so many requests more have ended."""
        wanted = self.ended.total() + more
        end = time.monotonic() + PATIENCE
        while self.ended.total() < wanted and time.monotonic() < end:
            time.sleep(0.01)

    def _ask(self, number: int) -> None:
        rng = np.random.default_rng(number)
        connection = http.client.HTTPConnection(self._server.http, timeout=10)
        while not self._stop.is_set():
            name = str(rng.choice(list(MODELS)))
            row = int(rng.integers(len(self._rows[name])))
            how = self._request(connection, name, row)
            with self._lock:
                self.ended[how] += 1
                self.answered[name] += how == "answered"
            time.sleep(PAUSE)

    def _request(self, connection: http.client.HTTPConnection, name: str, row: int) -> str:
        values = self._rows[name][row : row + 1]
        tensor = {"name": MODELS[name], "datatype": "FP32", "shape": values.shape, "data": values.ravel().tolist()}
        try:
            connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}))
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            return f"lost: {type(error).__name__}"
        if response.status != 200:
            return f"{response.status}: {answer.get('error', '')}"
        right = np.allclose(answer["outputs"][0]["data"], self._expected[name][row], atol=1e-4)
        return "answered" if right else "wrong"


def outputs(folder: Path, name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what a model says here."""
    (path,) = folder.glob("*/model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {name: rows})[0])


def states(server: FrontEnd) -> dict[str, set[str]]:
    """Return the states of workers, by device."""
    connection = http.client.HTTPConnection(server.http, timeout=10)
    connection.request("GET", "/cotenant/status")
    status = json.loads(connection.getresponse().read())
    found: dict[str, set[str]] = {}
    for worker in status["workers"]:
        found.setdefault(worker["lane"].rpartition("/")[0], set()).add(worker["state"])
    return found


def until(server: FrontEnd, device: str, state: str) -> float:
    """Wait until all workers of a device are in a state; return how many seconds that took."""
    began = time.monotonic()
    while states(server).get(device) != {state}:
        if time.monotonic() - began > PATIENCE:
            sys.exit(f"{device} is not {state} after {PATIENCE:.0f} s: {states(server)}")
        time.sleep(0.02)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="Requests of each of the three stages.")
    parser.add_argument("--json", action="store_true", help="Print figures as JSON.")
    options = parser.parse_args()
    if why := missing():
        sys.exit(why)

    def say(words: str) -> None:
        if not options.json:
            print(words, flush=True)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        build_models(folder / "models", MODELS)
        here, there = stack.enter_context(hosts(2))
        _, first = stack.enter_context(node_at(here, folder / "a", NODE))
        victim, second = stack.enter_context(node_at(there, folder / "b", NODE))
        say(f"nodes at {first} and {second}; the server sends them {' and '.join(MODELS)}, and profiles these there")
        entries = "".join(f'[[models]]\nname = "{name}"\nslo = "{SLO}s"\nrate = 10\n' for name in MODELS)
        server = stack.enter_context(front_end(folder, SETTINGS + entries, [first, second]))
        for device in server.plan["devices"]:
            for partition in device["partitions"]:
                held = ", ".join(placement["model"] for placement in partition["placements"])
                say(f"  {device['kind']}-{device['id']}: {partition['share_pct']:g} % {held}")
        callers = Callers(server, folder / "models")
        callers.start()
        stack.callback(callers.stop)
        callers.wait_for(options.requests)
        say(f"{callers.ended.total()} requests: {dict(callers.ended)}")
        victim.kill()
        victim.wait()
        noticed = until(server, "node-b/cpu-0", "lost")
        say(f"node-b was killed, as status tells within {noticed:.2f} s")
        callers.wait_for(options.requests)
        say(f"{callers.ended.total()} requests: {dict(callers.ended)}")
        port = int(second.rpartition(":")[2])
        stack.enter_context(node_at(there, folder / "b", NODE, port=port))
        back = until(server, "node-b/cpu-0", "ready")
        say(f"node-b was started again, and serves after {back:.1f} s")
        callers.wait_for(options.requests)
        callers.stop()
        say(f"{callers.ended.total()} requests: {dict(callers.ended)}; right, by model: {dict(callers.answered)}")
        lost = callers.ended.total() - callers.ended["answered"]
        if options.json:
            figures = {"requests": callers.ended.total(), "ended": callers.ended, "noticed_s": noticed, "back_s": back}
            print(json.dumps({"benchmark": "cluster", **figures}))
        else:
            print("nothing was lost" if not lost else f"{lost} requests were not answered rightly")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
