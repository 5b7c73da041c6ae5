"""Rollouts of a real server, with requests in flight throughout: none of them is lost, whatever fails."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cotenant.backends.cpu import Cpu
from cotenant.cli.status import status_view
from cotenant.control.orchestrator import Command, Event
from cotenant.control.revision import MemoryPolicy, PlanRevision
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition, Placement
from cotenant.core.profile import Point, Profile
from cotenant.errors import FailedError, RequestError, RolloutError, WorkerError
from cotenant.live.deployment import Deployment
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.metrics import render
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import ask, floats, run, until


def shared(given: Deployment, *shares: int) -> Deployment:
    """Model `identity` on a partition of each of these shares."""
    partitions = tuple(
        Partition(share=share, placements=(Placement(model="identity", batch=1, rate=1.0, duty=0.01, latency=0.01),))
        for share in shares
    )
    plan = msgspec.structs.replace(given.plan, devices=(Device(id=DeviceId("cpu"), partitions=partitions),))
    return msgspec.structs.replace(given, plan=plan)


def broken(given: Deployment) -> Deployment:
    """The same, of a file that no worker can load."""
    offered = given.offered["identity"]
    path = offered.entry.path.with_name("broken.onnx")
    path.write_bytes(b"this is no model")
    entry = msgspec.structs.replace(offered.entry, path=path)
    return msgspec.structs.replace(given, offered={"identity": msgspec.structs.replace(offered, entry=entry)})


class Asking:
    """A server that is asked all the time."""

    def __init__(self, server: Server, given: Deployment) -> None:
        self.server = server
        self.given = given
        self.answers: list[InferResponse | RequestError] = []
        self.asked = 0

    async def ask(self) -> None:
        while True:
            self.server.infer(InferRequest(model="identity", inputs=(floats(),)), self.answers.append)
            self.asked += 1
            await asyncio.sleep(0.005)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.server._rollouts.workers() if worker.pid is not None]


@asynccontextmanager
async def asked(root: Path, backend: Cpu | None = None, shares: tuple[int, ...] = (400,)) -> AsyncIterator[Asking]:
    """All that was asked has been answered in the end."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    given = sample_deployment(repository(root), ("identity",))
    server = Server(shared(given, *shares), backend or Cpu(), prepare)
    await server.start()
    asking = Asking(server, given)
    task = asyncio.create_task(asking.ask())
    try:
        yield asking
        task.cancel()
        await until(lambda: len(asking.answers) == asking.asked)
        assert [answer for answer in asking.answers if isinstance(answer, RequestError)] == []
    finally:
        task.cancel()
        await server.stop(1.0)


def test_worker_that_does_not_start_rolls_the_revision_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server, before = asking.server, asking.pids()
            with pytest.raises(
                WorkerError, match=r"^the worker of cpu-0/1 did not start: .*broken\.onnx: no ONNX model"
            ):
                await server.apply(broken(shared(asking.given, 600)))
            assert asking.pids() == before
            status = (await server.status()).rollout
            assert (status.revision, status.desired, status.phase) == (1, 1, "")
            assert status.sentence() == "revision 1 (start of the server) in force"
            failed, first = status.last
            assert (failed.revision, failed.reason, failed.outcome) == (2, "reload", "rolled-back")
            assert failed.failed and not first.failed
            assert failed.failure.startswith("the worker of cpu-0/1 did not start: ")
            assert failed.durations.prepare > 0 and first.durations.prepare > 0
            assert first.row()[:3] == ["1", "start of the server", "completed"] and first.failure == ""
            shown = io.StringIO()
            Console(file=shown, width=200).print(status_view(await server.status()))
            got: list[bytes] = []
            server.page.subscribe(got.append)()
            assert "revision 1 (start of the server) in force" in shown.getvalue()
            durations = status.durations
            assert durations["whole"].count == durations["prepare"].count == 2
            assert durations["drain"].count == durations["rollback"].count == 1 and status.late == 0
            assert durations["whole"].max >= failed.durations.prepare + failed.durations.rollback
            rows = [re.split(r"[ │]{2,}", line.strip("│ ")) for line in shown.getvalue().splitlines()]
            assert ["prepare", *durations["prepare"].row()] in rows
            assert "requests late while a rollout was under way: 0" in shown.getvalue()
            assert b'{"step":"prepare","count":2,' in b"".join(got) and b'"step":"decision"' not in b"".join(got)
            assert b'"revision":1,"reason":"start of the server"' in b"".join(got)
            for text in (shown.getvalue(), b"".join(got).decode()):
                for cell in (*failed.row()[:3], "the worker of cpu-0/1 did not start"):
                    assert cell in text
            body, _ = render(server.metrics(), "")
            assert b'cotenant_rollouts_total{outcome="rolled-back"} 1.0' in body
            assert b"cotenant_rollout_revision 1.0" in body
            assert b'cotenant_rollout_phase_seconds_count{phase="rollback"} 1.0' in body

    run(main())


def test_status_counts_late_requests_of_a_rollout_that_is_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server = asking.server
            reporter, late = server._reporter, (await server.status()).rollout.late
            reporter._rollouts.statistics.requested(7, reporter._observer.late)
            reporter._observer.rejected_unread("identity", [0.1, 0.2], "queue")
            assert (await server.status()).rollout.late == late + 2

    run(main())


def test_switch_is_over_before_old_workers_are_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            orchestrator, heard = asking.server._rollouts.orchestrator, []
            handle = orchestrator.handle

            def hear(event: Event, now: float) -> list[Command]:
                heard.append(type(event).__name__)
                return handle(event, now)

            asking.server._rollouts._control._pump._handle = hear
            await asking.server.apply(shared(asking.given, 600))
            await asking.server._rollouts.idle()
            assert heard.index("Switched") + 1 == heard.index("Drained")

    run(main())


def test_last_deployment_applied_during_a_rollout_is_next_and_the_others_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server = asking.server
            first = asyncio.create_task(server.apply(shared(asking.given, 500)))
            await asyncio.sleep(0)
            second = asyncio.create_task(server.apply(shared(asking.given, 550)))
            await asyncio.sleep(0)
            assert (await server.status()).rollout.sentence() == (
                "revision 1 (start of the server) in force; revision 3 (reload) wanted; rollout of revision 2: prepare"
            )
            await server.apply(shared(asking.given, 600))
            await first
            with pytest.raises(RolloutError, match=r"^revision 3 \(reload\) was superseded: revision 4 was requested"):
                await second
            await until(lambda: [worker.share for worker in server._rollouts.workers()] == [600])
            assert (await server.status()).rollout.revision == 4

    run(main())


def test_lanes_of_a_failed_rollout_are_forgotten_though_another_is_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            rollouts = asking.server._rollouts
            assigned: list[set[LaneId]] = []
            answer = rollouts._assign

            def assign(revision: PlanRevision) -> None:
                assigned.append(set(rollouts._control.setups))
                answer(revision)

            rollouts._assign = assign  # type: ignore[method-assign]
            bad = broken(shared(asking.given, 500, 600))
            first = asyncio.create_task(asking.server.apply(bad))
            await asyncio.sleep(0)
            await asking.server.apply(shared(asking.given, 550))
            with pytest.raises(WorkerError):
                await first
            in_force = LaneId(DeviceId("cpu"), 0)
            assert assigned == [{in_force}, {in_force}]

    run(main())


def test_command_that_fails_rolls_the_revision_back_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the two workers that start, the command of the first one fails for a reason that nobody has thought of."""

    async def main() -> None:
        async with asked(tmp_path) as asking:
            pool = asking.server._rollouts._control.pool
            spawn, spawned = pool.spawn, []

            def fails_once(lane: LaneId, incarnation: int, setup: LaneSetup, **options: Any) -> None:
                spawned.append(setup.share)
                if len(spawned) == 1:
                    raise ValueError("no such number")
                spawn(lane, incarnation, setup, **options)

            monkeypatch.setattr(pool, "spawn", fails_once)
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/2 did not start: ValueError: no such number$"):
                await asking.server.apply(shared(asking.given, 300, 350))
            assert spawned == [350, 300]
            assert [worker.share for worker in asking.server._rollouts.workers()] == [400]
            await asking.server.apply(shared(asking.given, 300, 350))

    run(main())
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.getMessage().startswith("a command was not carried out: SpawnWorker(")


def test_assignment_that_fails_rejects_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:

            def fails(*given: object) -> None:
                raise ValueError("no such number")

            monkeypatch.setattr(asking.server._rollouts, "_planned", fails)
            with pytest.raises(RolloutError, match=r"was rejected: ValueError: no such number$"):
                await asking.server.apply(shared(asking.given, 500))

    run(main())


def test_backend_that_fails_unexpectedly_rolls_the_revision_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise ValueError("no such number")

    async def main() -> None:
        backend = Cpu()
        async with asked(tmp_path, backend) as asking:
            with monkeypatch.context() as patched:
                patched.setattr(backend, "open", fails)
                with pytest.raises(WorkerError, match=r"did not start: ValueError: no such number$"):
                    await asking.server.apply(shared(asking.given, 500))
            monkeypatch.setattr(backend, "close", fails)
            await asking.server.apply(shared(asking.given, 500))
            await until(lambda: [worker.share for worker in asking.server._rollouts.workers()] == [500])

    run(main())


def test_apply_that_is_cancelled_is_aborted(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server = asking.server
            applying = asyncio.create_task(server.apply(shared(asking.given, 500)))
            await until(lambda: len(server._rollouts.workers()) == 2)
            applying.cancel()
            await until(lambda: len(server._rollouts.workers()) == 1 and not server._rollouts.status().phase)
            assert (await server.status()).rollout.revision == 1

    run(main())


def test_unload_during_a_reload_builds_on_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server = asking.server
            reload = asyncio.create_task(server.apply(sample_deployment(tmp_path, ("identity", "lookup"))))
            await asyncio.sleep(0)
            await server.unload("lookup", {})
            await reload
            assert {entry.name for entry in server.index(ready=True)} == {"identity"}
            status = (await server.status()).rollout
            assert (status.revision, status.reason) == (3, "unload of lookup")

    run(main())


@pytest.mark.parametrize("which", ["old", "new"])
def test_worker_that_is_killed_during_a_rollout_costs_no_request(tmp_path: Path, which: str) -> None:
    async def main() -> None:
        async with asked(tmp_path, shares=(300, 200)) as asking:
            server = asking.server
            for shares in ((400, 100), (500, 150)):
                applying = asyncio.create_task(server.apply(shared(asking.given, *shares)))
                if which == "new":
                    await until(lambda task=applying: len(asking.pids()) > 2 or task.done())  # type: ignore[misc]
                os.kill(asking.pids()[0 if which == "old" else -1], signal.SIGKILL)
                await applying
                await until(lambda: not server._rollouts.status().phase)
            assert isinstance(await ask(server, "identity", floats()), InferResponse)

    run(main())


class Two(Cpu):
    """Two devices, either of which can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: dict[DeviceId, str] = {}

    def lost(self) -> dict[DeviceId, str]:
        return self.gone


def test_device_that_is_lost_during_a_rollout_rolls_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.live import control_driver

    monkeypatch.setattr(control_driver, "TICK", 0.02)

    async def main() -> None:
        backend = Two()
        async with asked(tmp_path, backend) as asking:
            server = asking.server
            old = shared(asking.given, 400).plan.devices[0]
            new = msgspec.structs.replace(shared(asking.given, 500).plan.devices[0], id=DeviceId("cpu", 1))
            plan = msgspec.structs.replace(asking.given.plan, devices=(old, new))
            applying = asyncio.create_task(server.apply(msgspec.structs.replace(asking.given, plan=plan)))
            await until(lambda: len(server._rollouts.workers()) == 2)
            backend.gone = {DeviceId("cpu", 1): "it fell off the bus"}
            with pytest.raises(WorkerError, match=r"^the worker of cpu-1/0 did not start: cpu-1 is lost: it fell off"):
                await applying
            assert [worker.lane for worker in server._rollouts.workers()] == ["cpu-0/0"]

    run(main())


def together(given: Deployment, share: int, procs: int) -> Deployment:
    """Model `identity` with so many workers on one partition."""
    points = [Point(share=share, batch=1, latency=0.01, memory=1 << 20, procs=procs)]
    placement = Placement(model="identity", batch=1, rate=1.0, duty=0.01, latency=0.01, procs=procs)
    device = Device(id=DeviceId("cpu"), partitions=(Partition(share=share, placements=(placement,)),))
    return msgspec.structs.replace(
        given,
        plan=msgspec.structs.replace(given.plan, devices=(device,)),
        problem=msgspec.structs.replace(
            given.problem, profiles={("identity", "cpu"): Profile("identity", "cpu", points)}
        ),
    )


def test_several_workers_of_a_model_share_a_partition(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(tmp_path) as asking:
            server = asking.server
            await server.apply(together(asking.given, 500, 2))
            await until(lambda: not server._rollouts.status().phase)
            first, second = server._rollouts.workers()
            assert (first.lane, second.lane) == ("cpu-0/1", "cpu-0/1.2")
            assert (first.share, second.share) == (250, 250) and first.pid != second.pid

            def busy() -> set[str]:
                return {number for (device, number), seconds in server._observer.busy.items() if device and seconds}

            await until(lambda: "0" in busy())
            assert second.pid is not None and first.pid is not None
            await asyncio.gather(*(ask(server, "identity", floats()) for _ in range(20)))
            assert busy() == {"0", "0.2"}
            os.kill(first.pid, signal.SIGKILL)  # the other serves on
            await until(lambda: server._rollouts.workers()[0].restarts == 1)
            assert server._rollouts.workers()[1].pid == second.pid
            await server.apply(together(asking.given, 500, 3))
            await until(lambda: [worker.share for worker in server._rollouts.workers()] == [166] * 3)

    run(main())


@pytest.mark.parametrize("policy", MemoryPolicy)
def test_device_without_memory_for_both_plans_follows_the_policy(tmp_path: Path, policy: MemoryPolicy) -> None:
    """A worker takes 64 MiB by its profile; the device is given 100."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    given = sample_deployment(repository(tmp_path), ("identity",))
    (kind,) = given.problem.fleet
    fleet = (msgspec.structs.replace(kind, memory=100 << 20),)
    given = msgspec.structs.replace(given, problem=msgspec.structs.replace(given.problem, fleet=fleet))

    async def main() -> None:
        server = Server(shared(given, 400), Cpu(), prepare, memory_policy=policy)
        most = 0

        def look() -> bool:
            nonlocal most
            most = max(most, len(server._rollouts.workers()))
            return applying.done()

        try:
            await server.start()
            applying = asyncio.create_task(server.apply(shared(given, 600)))
            await until(look)
            if policy is MemoryPolicy.REFUSE:
                with pytest.raises(RolloutError, match="cpu-0 has 100 MiB of memory, and its workers need 128 MiB"):
                    await applying
            else:
                await applying
            share = 400 if policy is MemoryPolicy.REFUSE else 600
            await until(lambda: [worker.share for worker in server._rollouts.workers()] == [share])
            assert most == (2 if policy is MemoryPolicy.OVERSUBSCRIBE else 1)
            assert isinstance(await ask(server, "identity", floats()), InferResponse)
        finally:
            await server.stop(1.0)

    run(main())


def test_gap_rollout_that_fails_starts_the_old_worker_again(tmp_path: Path) -> None:
    """The old worker stops to make room for one that never gets ready; two more revisions come meanwhile."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    given = sample_deployment(repository(tmp_path), ("identity",))
    (kind,) = given.problem.fleet
    fleet = (msgspec.structs.replace(kind, memory=100 << 20),)
    given = msgspec.structs.replace(given, problem=msgspec.structs.replace(given.problem, fleet=fleet))

    async def main() -> None:
        server = Server(shared(given, 400), Cpu(), prepare, memory_policy=MemoryPolicy.GAP)
        try:
            await server.start()
            failing = asyncio.create_task(server.apply(broken(shared(given, 600))))
            await asyncio.sleep(0)  # it has begun: the next ones are queued
            superseded = asyncio.create_task(server.apply(shared(given, 500)))
            last = asyncio.create_task(server.apply(shared(given, 400)))
            with pytest.raises(RolloutError, match="superseded"):
                await superseded
            with pytest.raises(WorkerError, match=r"broken\.onnx: no ONNX model"):
                await failing
            await last
            await until(lambda: [worker.share for worker in server._rollouts.workers()] == [400])
            await until(lambda: server.model_ready("identity"))
            assert isinstance(await ask(server, "identity", floats()), InferResponse)
            assert len(server._rollouts._control.setups) == 1
        finally:
            await server.stop(1.0)

    run(main())
