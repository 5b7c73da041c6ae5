"""How long do others wait while one caller sends long JSON?

`python -m benchmarks.long_json [--seconds S] [--json]`

One caller posts a list of 1.5 million numbers (13 MiB of JSON, flat and then nested) again and again; another posts
small requests, each 2 ms after the last was answered, first alone and then beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks import onnx_models
from benchmarks.harness import SMALL, Served, cotenant, show

WIDTH = 1_500_000
REST = 0.002  # seconds
MODELS = {
    "small": Served(make=onnx_models.identity, latencies={1: 0.001}, slo=5.0, rate=10),
    "long": Served(make=partial(onnx_models.mean, width=WIDTH), latencies={1: 0.005}, slo=5.0, rate=1),
}


def long_body(*, nested: bool) -> bytes:
    numbers = ",".join(f"{value:.6f}" for value in np.random.default_rng(0).random(WIDTH))
    head = json.dumps({"name": "x", "shape": [1, WIDTH], "datatype": "FP32"})[:-1]
    return f'{{"inputs": [{head}, "data": {"[[" if nested else "["}{numbers}{"]]" if nested else "]"}}}]}}'.encode()


class Caller:
    """Post to a model over a bare socket, so that little of the time is this program's own."""

    def __init__(self, url: str, model: str, body: bytes) -> None:
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body

    def ask(self) -> float:
        """Return the seconds until the whole response was there."""
        begun = time.perf_counter()
        self._socket.sendall(self._request)
        data, whole = b"", -1
        while whole < 0 or len(data) < whole:
            received = self._socket.recv(1 << 20)
            assert received, "the server closed the connection"
            data += received
            if whole < 0 and (end := data.find(b"\r\n\r\n")) >= 0:
                whole = end + 4 + int(re.findall(rb"(?im)^content-length: *(\d+)", data[:end])[0])
        assert data.startswith(b"HTTP/1.1 200"), data[:300]
        return time.perf_counter() - begun

    def close(self) -> None:
        self._socket.close()


@contextmanager
def asking(caller: Caller, took: list[float]) -> Iterator[None]:
    """Let a caller ask again and again within the block."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            took.append(caller.ask())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def waits(caller: Caller, seconds: float) -> list[float]:
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        time.sleep(REST)
        found.append(caller.ask())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    seconds = parser.parse_args().seconds
    with cotenant(MODELS, adapt=False) as (_, url):
        small = Caller(url, "small", SMALL)
        waits(small, 0.5)
        found, took = {"alone": waits(small, seconds)}, dict[str, list[float]]()
        for name, nested in (("flat", False), ("nested", True)):
            long = Caller(url, "long", long_body(nested=nested))
            with asking(long, took.setdefault(name, [])):
                found[name] = waits(small, seconds)
            long.close()
            if not took[name]:
                sys.exit("no long request was answered")
        small.close()
    for name, values in found.items():
        p50, p99, most = np.percentile(values, [50, 99, 100]) * 1e3
        own = np.median(took[name]) * 1e3 if name in took else 0.0
        beside = f"beside long JSON, {name}, answered in {own:.0f} ms" if own else "alone"
        show(
            f"small requests {beside}",
            f"p50 {p50:.1f} ms, p99 {p99:.1f}, most {most:.1f}",
            p50_ms=p50,
            p99_ms=p99,
            most_ms=most,
            long_ms=own,
        )


if __name__ == "__main__":
    main()
