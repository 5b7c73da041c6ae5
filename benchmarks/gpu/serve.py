"""Stage 5: `cotenant serve` as a user starts it, under load over HTTP: `serve.json`, and `serve-<backend>.log`.

Its models get half of what the planner finds the device able to serve, or as much of it as one load generator can send,
by Poisson arrivals from a process of its own. Then the highest rate doubles, a worker is killed, and a training step
runs as a best-effort job, in turns with and without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import uvloop

from benchmarks.adaptive import Segment, Tick, attainment, send, sending
from benchmarks.gpu import profiles
from benchmarks.gpu.live import prepared
from benchmarks.gpu.session import Session
from benchmarks.harness import processor_time
from cotenant.backends import nvidia
from cotenant.cli.client import fetch_status
from cotenant.core.tensor import DTYPES
from cotenant.errors import CotenantError
from cotenant.live.deployment import ServableModel
from cotenant.live.status import Status

LOAD = 0.5  # of the planned rates
BYTES, REQUESTS = 250e6, 1500.0  # a second, that one load generator can send
SETTLE, STEADY, DOUBLED, KILLED, TURN = 5.0, 10.0, 12.0, 20.0, 6.0  # seconds
KILL_AFTER = 2.0  # seconds
ROUNDS = 2  # of turns without and with the job
JOB, JOB_START = "albert_train", 40.0  # seconds until its first step
LARGE = 1 << 16  # bytes of a request's inputs
START, STOP = 180.0, 30.0  # seconds that the server may take
LEAST = 60.0  # seconds that the stage takes at least


def run(session: Session, models: Mapping[str, ServableModel]) -> None:
    path = session.out / "serve.json"
    results: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    for place, name in enumerate(session.backends):
        known = profiles.read(session.out / f"profiles-{name}.csv")
        there = sorted(models.keys() & known)
        rest = session.left * (1 - 1 / (len(session.backends) - place))
        if not there or session.left - rest < LEAST:
            session.lacks(f"{name}: cotenant serve: " + ("out of time" if there else "it needs profiles of stage 2"))
            continue
        with session.backend(name) as backend:
            if backend is None:
                continue
            _, deployment = uvloop.run(prepared(session, name, there, backend))
            plan = deployment.plan
        if not plan.devices:
            session.lacks(f"{name}: cotenant serve: no plan serves a model")
            continue
        whole = sum(plan.rates().values())
        rates = _to_send({model: models[model] for model in there}, plan.rates())
        result = results[name] = {"planned_s": whole, "rates": rates}
        try:
            with _serving(session, name, rates) as (pid, address, started):
                result["start_s"] = started
                uvloop.run(_Visit(session, name, pid, address, rates, result, rest).all())
        except (CotenantError, OSError, subprocess.SubprocessError, TimeoutError) as error:
            session.lacks(f"{name}: cotenant serve: {type(error).__name__}: {error}")
        finally:
            session.write(path.name, msgspec.json.format(msgspec.json.encode(results), indent=1))


def _to_send(models: Mapping[str, ServableModel], planned: Mapping[str, float]) -> dict[str, float]:
    """Return the requests/s to send of each model: of those with large inputs fewer, if all would be too much."""
    size = {
        name: sum(DTYPES[spec.datatype].itemsize * math.prod(spec.shape[1:]) for spec in model.info.inputs)
        for name, model in models.items()
    }
    rates = {name: LOAD * planned.get(name, 0.0) for name in models}
    large = {name for name in models if size[name] > LARGE}
    sent = sum(size[name] * rates[name] for name in large)
    rates = {name: rate * (min(1.0, BYTES / sent) if name in large else 1.0) for name, rate in rates.items()}
    whole = sum(rates.values())
    return {name: rate * min(1.0, REQUESTS / whole) for name, rate in rates.items() if rate}


def settings_text(session: Session, backend: str, rates: Mapping[str, float]) -> str:
    lines = [
        f'backend = "{backend}"',
        f'model_repository = "{session.repository.absolute()}"',
        f'profiles = "{(session.out / f"profiles-{backend}.csv").absolute()}"',
        f'state = "{(session.out / f".state-{backend}.sqlite").absolute()}"',
        *(f"{front}_port = 0" for front in ("http", "grpc", "metrics")),
    ]
    for model, rate in rates.items():
        lines += ["[[models]]", f'name = "{model}"', f'slo = "{session.targets[model].slo * 1e3:g}ms"']
        lines += [f"rate = {rate:.6g}"]
    return "\n".join(lines) + "\n"


@contextmanager
def _serving(session: Session, backend: str, rates: Mapping[str, float]) -> Iterator[tuple[int, str, float]]:
    """Start the server as a process of its own; yield its pid, its address, and how long it took. It must end by
    itself when asked to."""
    file = session.out / f"serve-{backend}.toml"
    session.write(file.name, settings_text(session, backend, rates))
    command = [sys.executable, "-m", "cotenant", "serve", str(file), "--json"]
    for model in rates:
        command += ["--load-model", model]
    begun = time.monotonic()
    with (session.out / f"serve-{backend}.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        os.set_blocking(server.stdout.fileno(), False)
        line = ""
        while not line.endswith("\n"):
            line += server.stdout.readline()
            if server.poll() is not None or time.monotonic() - begun > START:
                raise TimeoutError(f"it has not started after {time.monotonic() - begun:.0f} s")
            time.sleep(0.05)
        yield server.pid, json.loads(line)["addresses"]["http"], time.monotonic() - begun
        server.terminate()
        ended = server.wait(STOP)
        session.say(f"{backend}: cotenant serve ended with {ended} after SIGTERM")
        if ended:
            session.lacks(f"{backend}: cotenant serve ended with {ended}")
    finally:
        server.kill()
        server.wait()


class _Visit:
    """Load a running server, and note what becomes of it. rest: seconds to leave for later backends."""

    def __init__(
        self,
        session: Session,
        backend: str,
        pid: int,
        address: str,
        rates: dict[str, float],
        result: dict[str, Any],
        rest: float,
    ) -> None:
        self._session = session
        self._backend = backend
        self._pid = pid
        self._address = address
        self._rates = rates
        self._result = result
        self._rest = rest

    async def all(self) -> None:
        await self._sent(SETTLE, self._rates, 1)
        for name, phase, seconds in (
            ("steady", self._steady, STEADY),
            ("doubled", self._doubled, DOUBLED),
            ("killed", self._killed, KILLED),
            ("job", self._job, (2 * TURN + 3) * ROUNDS),
        ):
            if self._session.left - self._rest < seconds + STOP / 2:
                self._session.lacks(f"{self._backend}: cotenant serve: {name}: out of time")
                return
            self._result[name] = await phase()

    async def _sent(self, seconds: float, rates: Mapping[str, float], seed: int) -> Tick:
        return (await send(self._address, [Segment(seconds, dict(rates))], seed))[-1]

    async def _status(self) -> Status:
        return await asyncio.to_thread(fetch_status, self._address)

    async def _steady(self) -> dict[str, Any]:
        used = processor_time(self._pid)
        tick = await self._sent(STEADY, self._rates, 2)
        used = processor_time(self._pid) - used
        found = _figures(tick) | {"processor_us_a_request": 1e6 * used / max(1, tick.stayed), "lag_s": tick.lag}
        if self._backend != "cpu":
            found["gpu"] = msgspec.to_builtins(nvidia.gpu_reading(nvidia.list_gpus()[0].uuid))
        self._say("at fixed rates", tick, f"; {found['processor_us_a_request']:.0f} µs of processors each")
        return found

    async def _doubled(self) -> dict[str, Any]:
        highest = max(self._rates, key=lambda model: self._rates[model])
        more = self._rates | {highest: 2 * self._rates[highest]}
        before = (await self._status()).rollout
        segments = [Segment(2.0, self._rates), Segment(DOUBLED - 2.0, more)]
        ticks = await send(self._address, segments, 3)
        after = (await self._status()).rollout
        first, later = attainment(ticks, 2.0, 5.0), attainment(ticks, 5.0, DOUBLED)
        self._say(
            f"{highest} doubled", ticks[-1],
            f"; {100 * first:.2f} % in the first 3 s, then {100 * later:.2f} %; revision {before.revision} -> "
            f"{after.revision} ({after.reason})",
        )  # fmt: skip
        await self._sent(3.0, self._rates, 4)
        return _figures(ticks[-1]) | {
            "model": highest,
            "attainment_first_3_s": first,
            "attainment_later": later,
            "revisions": [before.revision, after.revision],
            "rollouts": msgspec.to_builtins(after.last, enc_hook=str),
        }

    async def _killed(self) -> dict[str, Any]:
        ticks: list[Tick] = []
        back = 0.0

        async def kill() -> float:
            await asyncio.sleep(KILL_AFTER)
            workers = (await self._status()).workers
            pids = {worker.pid for worker in workers if worker.pid}
            victim = min(pids)
            os.kill(victim, signal.SIGKILL)
            begun = time.monotonic()
            while time.monotonic() - begun < START:
                await asyncio.sleep(0.05)
                workers = (await self._status()).workers
                if all(worker.state == "ready" and worker.pid != victim for worker in workers):
                    return time.monotonic() - begun
            raise TimeoutError(f"a killed worker is not back after {START:g} s")

        killing: asyncio.Task[float] | None = None
        async for tick in sending(self._address, [Segment(KILLED, self._rates)], 5):
            killing = killing or asyncio.create_task(kill())
            ticks.append(tick)
        if killing is not None:
            back = await killing
        end = ticks[-1]
        self._say("a worker killed", end, f"; back after {back:.2f} s; {end.failed} failed")
        return _figures(end) | {"back_s": back, "failed": end.failed}

    async def _job(self) -> dict[str, Any]:
        """Compare turns without and with the job, both with the same arrivals."""
        found: dict[str, Any] = {"without": [], "with": []}
        for number in range(ROUNDS):
            for beside in (False, True) if number % 2 == 0 else (True, False):
                if beside:
                    job = await self._submit()
                    tick = await self._sent(TURN, self._rates, 10 + number)
                    state = await self._cancel(job)
                    found["with"].append(_figures(tick) | {"job": state})
                else:
                    await asyncio.sleep(1.0)
                    tick = await self._sent(TURN, self._rates, 10 + number)
                    found["without"].append(_figures(tick))
                self._say(f"{'beside ' + JOB if beside else 'without a job'}", tick, f"; {state}" if beside else "")
        return found

    async def _submit(self) -> str:
        said = await self._command("jobs", "submit", "--train", JOB, "--batch", "4", "--steps", "1000000", "--json")
        job = str(json.loads(said)["job"]["id"])
        until = time.monotonic() + JOB_START
        while True:
            status = next(each for each in (await self._status()).jobs if each.job.id == job)
            if status.progress.steps:
                return job
            if status.state.ended or time.monotonic() > until:
                raise OSError(f"{JOB} has taken no step: {status.state}: {status.reason}")
            await asyncio.sleep(0.1)

    async def _cancel(self, job: str) -> dict[str, Any]:
        status = next(each for each in (await self._status()).jobs if each.job.id == job)
        with contextlib.suppress(subprocess.CalledProcessError):
            await self._command("jobs", "cancel", job)
        return {
            "state": str(status.state),
            "reason": status.reason,
            "steps": status.progress.steps,
            "share_seconds": status.progress.share_seconds,
        }

    async def _command(self, *arguments: str) -> str:
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "cotenant", *arguments, "--address", self._address],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if ran.returncode:
            raise OSError(f"cotenant {' '.join(arguments)}: {ran.stderr.strip()}")
        return ran.stdout

    def _say(self, what: str, tick: Tick, more: str = "") -> None:
        rate = tick.stayed / max(tick.seconds, 1e-9)
        within = 100 * tick.within_target / max(1, tick.stayed)
        self._session.say(f"{self._backend}: {what}: {rate:.0f} requests/s, {within:.2f} % in time{more}")
        rows = sorted(tick.models, key=lambda row: row.attainment or 0.0)
        worst = ", ".join(
            f"{row.model} {100 * (row.attainment or 0):.1f} % p99 {1e3 * (row.p99 or 0):.1f} ms" for row in rows[:3]
        )
        self._session.say(f"  lowest: {worst}")


def _figures(tick: Tick) -> dict[str, Any]:
    return {
        "seconds": tick.seconds,
        "requests": tick.stayed,
        "attainment": tick.within_target / max(1, tick.stayed),
        "rejected": tick.rejected,
        "models": {
            row.model: {
                "attainment": row.attainment,
                "p50_ms": None if row.p50 is None else 1e3 * row.p50,
                "p99_ms": None if row.p99 is None else 1e3 * row.p99,
                "outcomes": {str(name): count for name, count in row.outcomes.items()},
            }
            for row in tick.models
        },
    }
