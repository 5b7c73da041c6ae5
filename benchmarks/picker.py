"""Measure the endpoint picker: CPU time of a decision, and decisions a second over gRPC.

Replicas are programs that tell an admission state and serve nothing. Two ways:

- decisions alone, by the picker in this process: 8 replicas with two lanes, and 50 with four; each lane has four
  models, and 5,000 requests come a second of the picker's clock;
- `cotenant endpoint-picker` with 8 replicas, asked by h2load as Envoy asks: a call for each request, with its headers.
  First as fast as it answers, then at 5,000/s.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import msgspec

from benchmarks.harness import processor_time, show, started
from cotenant.core.identity import DeviceId, LaneId
from cotenant.k8s.picker.picker import EndpointPicker, Picked
from cotenant.protocol.ext_proc import SERVICE, ext_proc
from cotenant.runtime.admission_state import AdmissionState, LaneState, ModelTarget, QueueState, WaitingRequest

MODELS = tuple(f"model-{number}" for number in range(4))
RATE = 5000  # requests/s
DECISIONS = 5000
SECONDS = 5
CLIENTS = 16


def state(lanes: int, *, waiting: int = 3) -> AdmissionState:
    """Return a server whose lanes run a batch each, with requests in every queue."""
    queues = tuple(
        QueueState(
            model=model,
            latencies=tuple(0.002 + 0.0002 * rows for rows in range(1, 33)),
            waiting=tuple(WaitingRequest(0.05 + 0.001 * number) for number in range(waiting)),
        )
        for model in MODELS
    )
    return AdmissionState(
        accepting=True,
        models={model: ModelTarget(timeout=0.1) for model in MODELS},
        lanes=tuple(LaneState(id=LaneId(DeviceId("gpu"), n), free_in=0.003, queues=queues) for n in range(lanes)),
    )


def decide(replicas: int, lanes: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of a decision, in seconds."""
    picker, told = EndpointPicker(), state(lanes)
    seconds, picked, looked = [], 0, -1.0
    for number in range(DECISIONS):
        now = number / RATE
        if now - looked >= 0.1:
            looked = now
            for replica in range(replicas):
                picker.observe(f"10.0.0.{replica}:8000", told, now, now)
        began = time.perf_counter()
        decision = picker.pick(MODELS[number % len(MODELS)], now)
        seconds.append(time.perf_counter() - began)
        picked += isinstance(decision, Picked)
    assert picked > DECISIONS / 2
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]


async def serve_states(count: int) -> None:
    """Tell admission states on so many ports, and print these."""
    body = msgspec.json.encode(state(2), enc_hook=str)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
        except asyncio.IncompleteReadError:
            writer.close()

    servers = [await asyncio.start_server(respond, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def request() -> bytes:
    """Return what Envoy tells of a request, with gRPC's prefix."""
    message = ext_proc.ProcessingRequest()
    headers = {
        ":method": "POST",
        ":path": f"/v2/models/{MODELS[0]}/infer",
        ":authority": "inference.example.com",
        ":scheme": "http",
        "content-type": "application/json",
        "content-length": "512",
        "user-agent": "curl/8.5.0",
        "x-forwarded-for": "10.1.2.3",
        "x-forwarded-proto": "http",
        "x-request-id": "5b2c2c64-9a3e-4a6d-9a9a-0f0f9d6c9f10",
        "x-envoy-expected-rq-timeout-ms": "15000",
    }
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = 4
    message.protocol_config.response_body_mode = 4
    data: bytes = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def ask(address: str, pid: int, *, rate: int | None) -> tuple[float, float, float]:
    """Return answers/s, CPU seconds for each, and the mean latency. rate: requests/s; None: as many as are answered."""
    if shutil.which("h2load") is None:
        sys.exit("this benchmark asks with h2load, which is not installed; try: apt-get install nghttp2-client")
    with tempfile.NamedTemporaryFile() as body:
        body.write(request())
        body.flush()
        command = ["h2load", f"--duration={SECONDS}", f"--clients={CLIENTS}", "--max-concurrent-streams=4"]
        if rate is not None:
            command.append(f"--rps={rate / CLIENTS}")
        command += [f"--data={body.name}", "--header=content-type: application/grpc", "--header=te: trailers"]
        before = processor_time(pid)
        url = f"http://{address}/{SERVICE}/Process"
        output = subprocess.run([*command, url], check=True, capture_output=True, text=True).stdout
        spent = processor_time(pid) - before
    counts = re.search(r"(\d+) succeeded, (\d+) failed", output)
    mean = re.search(r"time for request: +\S+ +\S+ +([\d.]+)(us|ms|s)", output)
    if counts is None or mean is None or int(counts[2]):
        sys.exit(f"unexpected output of h2load: {output}")
    answered = int(counts[1])
    return answered / SECONDS, spent / answered, float(mean[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[mean[2]]


def main() -> None:
    few, many = decide(8, 2), decide(50, 4)
    with ExitStack() as stack:
        _, ports = stack.enter_context(started("-m", "benchmarks.picker", "states", "8"))
        replicas = [f"127.0.0.1:{port}" for port in json.loads(ports)]
        options = ("--port=0", "--metrics-port=0", "--json")
        pid, line = stack.enter_context(started("-m", "cotenant", "endpoint-picker", *replicas, *options))
        address = json.loads(line)["address"]
        time.sleep(1)  # until all replicas have told their states
        fastest, cpu, _ = ask(address, pid, rate=None)
        rate, cpu_at_rate, latency = ask(address, pid, rate=RATE)
    show(
        "picker",
        f"decision p50 {few[0] * 1e6:.0f} µs, p99 {few[1] * 1e6:.0f} µs (8 replicas, 2 lanes), "
        f"{many[0] * 1e6:.0f} and {many[1] * 1e6:.0f} µs (50 replicas, 4 lanes); over gRPC {fastest:.0f}/s at most, "
        f"{cpu * 1e6:.0f} µs CPU time each; at {rate:.0f}/s {cpu_at_rate * 1e6:.0f} µs CPU time, "
        f"latency {latency * 1e3:.2f} ms on average",
        decision_p50_us=few[0] * 1e6,
        decision_p99_us=few[1] * 1e6,
        decision_many_p50_us=many[0] * 1e6,
        decision_many_p99_us=many[1] * 1e6,
        fastest_per_s=fastest,
        cpu_us=cpu * 1e6,
        rate_per_s=rate,
        cpu_at_rate_us=cpu_at_rate * 1e6,
        latency_ms=latency * 1e3,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["states"]:
        asyncio.run(serve_states(int(sys.argv[2])))
    else:
        main()
