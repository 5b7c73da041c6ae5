"""A real server that adapts, with requests in flight throughout: none of them is lost."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.live import Live

from cotenant.app.solver import BackgroundSolver
from cotenant.backends.cpu import Cpu
from cotenant.cli.status import status_view
from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    ControllerCommand,
    ControllerEvent,
    CorrectProfile,
    DevicesFound,
    Observed,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.event_log import replay
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import RequestError, UnavailableError
from cotenant.live.adaptation import AdaptationOptions
from cotenant.live.adaptation_driver import AdaptationDriver
from cotenant.live.deployment import Deployment
from cotenant.live.metrics import render
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.rollout_statistics import Past
from cotenant.live.server import Server
from cotenant.planners.rates import at_rates
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import floats, indices, run, until

EAGER = ControllerOptions(settle=0.2, cooldown=4.0)


def planned_for(given: Deployment, rate: float) -> Deployment:
    """One request at a time, on the smallest share, which sustains 50/s."""
    problem = at_rates(given.problem, dict.fromkeys(given.problem.rates, rate))
    placement = Placement(model="identity", batch=1, rate=rate, duty=0.02, latency=0.02)
    devices = (Device(id=DeviceId("cpu"), partitions=(Partition(share=50, placements=(placement,)),)),)
    return msgspec.structs.replace(given, problem=problem, plan=Plan(planner="hand", devices=devices))


class Asking:
    """A server, and what was asked of it."""

    def __init__(self, server: Server, given: Deployment, log: io.BytesIO) -> None:
        self.server = server
        self.given = given
        self.log = log
        self.answers: list[InferResponse | RequestError] = []
        self.asked = 0

    async def ask(self, rate: float) -> None:
        while True:
            self.server.infer(InferRequest(model="identity", inputs=(floats(),)), self.answers.append)
            self.asked += 1
            await asyncio.sleep(1 / rate)

    def decisions(self) -> list[str]:
        adaptation = self.server._adaptation
        assert adaptation is not None
        status = adaptation.status()
        return [] if status is None else [decision.action for decision in reversed(status.decisions)]

    def planned(self, model: str) -> float:
        """Return the requests/s that the controller knows the plan in force to be made for."""
        adaptation = self.server._adaptation
        assert adaptation is not None
        status = adaptation.status()
        return 0.0 if status is None else status.models[model].planned


@asynccontextmanager
async def adaptive(root: Path, rate: float, options: ControllerOptions = EAGER) -> AsyncIterator[Asking]:
    """All that was asked has been answered in the end, and the log replays."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        return sample_deployment(root, tuple(sorted(wanted)))

    log = io.BytesIO()
    given = planned_for(sample_deployment(repository(root), ("identity",)), rate)
    adaptation = AdaptationOptions(solver=lambda: BackgroundSolver(lambda: "geometry"), controller=options)
    server = Server(given, Cpu(), prepare, adaptation=adaptation, log=log)
    asking = Asking(server, given, log)
    try:
        await server.start()
        yield asking
        await until(lambda: len(asking.answers) == asking.asked)
    finally:
        await server.drain(1.0)
        await server.stop(1.0)
    assert [answer for answer in asking.answers if isinstance(answer, RequestError)] == []
    replayed = replay(log.getvalue().splitlines())
    assert replayed.difference == "" and replayed.controller_events > 0


def test_server_plans_anew_for_a_rate_beyond_its_plan_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cotenant.live.adaptation_driver")

    async def main() -> None:
        async with adaptive(tmp_path, 1.0) as asking:
            server, before = asking.server, asking.server.deployment.plan
            task = asyncio.create_task(asking.ask(200.0))
            await until(lambda: asking.planned("identity") >= 100.0)
            task.cancel()
            status = await server.status()
            assert server.deployment.plan != before and status.adaptation is not None
            assert status.planned["identity"] >= 100.0
            deciding = status.adaptation.deciding
            assert deciding is not None and deciding.count >= 1
            assert 0.0 < deciding.p50 <= deciding.p99 <= deciding.max
            assert ["decision", *deciding.row()] in status.duration_rows()
            assert {each.model for each in status.batches} == {"identity"}
            for each in status.batches:
                assert each.batches > 0 and each.profiled > 0.0 and each.observed > 0.0
                assert each.row()[-2:] == [
                    f"{seconds / each.profiled:.2f}" for seconds in (each.predicted, each.observed)
                ]
            shown = io.StringIO()
            Console(file=shown, width=250).print(status_view(status))
            screen = io.StringIO()
            with Live(
                status_view(status),
                console=Console(file=screen, width=150, height=25, force_terminal=True),
                auto_refresh=False,
            ) as live:
                live.refresh()
                assert "in force after" in screen.getvalue(), "--watch cuts off what does not fit on the screen"
            got: list[bytes] = []
            server.page.subscribe(got.append)()
            for text in (shown.getvalue(), b"".join(got).decode()):
                assert "identity is offered" in text and "in force after" in text and "decision" in text
            assert all(cell in shown.getvalue() for each in status.batches for cell in each.row())
            assert b'{"step":"decision","count":' in b"".join(got)
            body, _ = render(server.metrics(), "")
            assert b'cotenant_adaptation_planned_rate{model="identity"}' in body
            assert b'cotenant_adaptation_seconds_count{step="solve"}' in body
            replans = [line for line in body.decode().splitlines() if 'replans_total{cause="rate"' in line]
            assert sum(float(line.split()[-1]) for line in replans) >= 1

    run(main())
    told = [record.getMessage() for record in caplog.records if "identity is offered" in record.getMessage()]
    assert any(line.startswith("adaptation: plan again: ") for line in told)
    assert any(line.startswith("adaptation: in force after ") for line in told)


def test_revision_of_a_caller_is_adopted_and_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            await server.load("lookup", {})
            await asyncio.sleep(0)  # the controller is told after the rollout's own event
            adaptation = server._adaptation
            assert adaptation is not None and adaptation._adapting is not None
            controller = adaptation._adapting.controller
            await until(lambda: controller._plan == server.deployment.plan)
            assert server.deployment.plan.rate("lookup")
            assert controller._targets.keys() == {"identity", "lookup"}
            await server.unload("lookup", {})
            await until(lambda: controller._plan == server.deployment.plan)
            assert not server.deployment.plan.rate("lookup")

    run(main())


def test_requests_for_an_unloaded_model_are_no_reason_to_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            await server.load("lookup", {})
            await server.unload("lookup", {})
            driving = server._adaptation._adapting  # type: ignore[union-attr]
            assert driving is not None
            await until(lambda: driving.known is server.deployment)
            for _ in range(300):
                with pytest.raises(UnavailableError, match="it is unloaded"):
                    server.infer(InferRequest(model="lookup", inputs=(indices(1),)), lambda answer: None)
            before = driving._observed_at
            await until(lambda: driving._observed_at > before)
            assert driving.controller.status().models.keys() == {"identity"}
            assert asking.decisions() == []

    run(main())


def test_device_that_a_reload_leaves_out_is_not_told_as_lost_before_the_reload_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 1.0) as asking:
            server = asking.server
            assert server._adaptation is not None
            driver = server._adaptation._adapting
            assert driver is not None and driver.controller.status().devices == (DeviceId("cpu"),)
            tell = server._rollouts.on_ended

            def tell_late(past: Past) -> None:
                driver._tell_news()  # as by a timer while old lanes drain
                tell(past)

            server._rollouts.on_ended = tell_late
            problem = msgspec.structs.replace(asking.given.problem, fleet=())
            await server.apply(msgspec.structs.replace(asking.given, problem=problem, plan=Plan(planner="hand")))
            await until(lambda: driver.controller.status().devices == ())
            assert asking.decisions() == []

    run(main())


def intercepted(server: Server) -> tuple[AdaptationDriver, list[object]]:
    """Keep events from a server's controller; return what carries out its commands, and the events."""
    assert server._adaptation is not None and server._adaptation._adapting is not None
    driver = server._adaptation._adapting
    fed: list[object] = []
    driver.feed = fed.append  # type: ignore[method-assign, assignment]
    return driver, fed


def test_plan_for_a_revision_that_is_gone_is_not_rolled_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            driver, fed = intercepted(server)
            solve = Solve(number=7, rates={"identity": 20.0}, current=server.deployment.plan, devices=())
            driver._perform(solve, 0.0)
            await server.load("lookup", {})
            driver._perform(Roll(7, asking.given.plan, {"identity": 20.0}, "too late"), 0.0)
            await until(lambda: any(isinstance(event, RollEnded) for event in fed))
            (ended,) = [event for event in fed if isinstance(event, RollEnded)]
            assert (ended.number, ended.outcome) == (7, RolloutOutcome.OUTDATED)
            assert server.deployment.plan.rate("lookup")

            fed.clear()
            driver._perform(msgspec.structs.replace(solve, number=8), 0.0)
            assert fed == [Solved(number=8, error="another revision is on its way", outdated=True)]

    run(main())


def test_plan_is_rolled_out_while_a_model_that_is_to_be_loaded_is_prepared_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            driver, fed = intercepted(server)
            prepare, attempts = server._deployments._prepare, 0

            async def disturbed(*given: Any) -> Deployment:
                nonlocal attempts
                attempts += 1
                assert attempts <= 2, "a load that is prepared again and again never ends"
                fed.clear()
                driver._perform(Roll(attempts, server.deployment.plan, {"identity": 20.0}, "more is offered"), 0.0)
                await until(lambda: any(isinstance(event, RollEnded) for event in fed))
                return await prepare(*given)

            server._deployments._prepare = disturbed
            await server.load("lookup", {})
            assert attempts == 2 and server._state.repeated_change == ""
            (ended,) = [event for event in fed if isinstance(event, RollEnded)]
            assert (ended.number, ended.outcome) == (2, RolloutOutcome.OUTDATED)
            assert ended.reason == "the load of lookup comes first: another plan was in its way already"
            assert server.deployment.plan.rate("lookup")

    run(main())


def test_fixed_devices_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            assert asking.server._adaptation is not None and asking.server._adaptation._adapting is not None
            driver = asking.server._adaptation._adapting
            fed: list[object] = []
            driver.feed = fed.append  # type: ignore[method-assign, assignment]
            driver._perform(Acquire("cpu", 2), 0.0)
            assert [type(event).__name__ for event in fed] == ["AcquisitionFailed"]

    run(main())


def test_corrected_profile_is_shown_and_told_with_the_next_revision(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            assert server._adaptation is not None and server._adaptation._adapting is not None
            driver = server._adaptation._adapting
            driver._perform(CorrectProfile("identity", 1.3, 512), 0.0)
            status = await server.status()
            assert status.adaptation is not None
            (line,) = [line for line in status.adaptation.sentences() if "corrected" in line]
            assert line.startswith("profile of identity corrected by × 1.3, from 512 batches, since 20")
            assert driver._adopted({}).corrections == {"identity": 1.3}
            driver._perform(CorrectProfile("identity", 1.0, 512), 0.0)
            assert driver._adopted({}).corrections == {}

    run(main())


def test_large_requests_count_by_their_rows(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            answers: list[InferResponse | RequestError] = []
            request = InferRequest(model="identity", inputs=(floats(rows=6),))
            asking.server.infer(request, answers.append)
            await until(lambda: len(answers) == 1)
            counts = asking.server._adaptation._adapting._counter  # type: ignore[union-attr]
            totals = counts._totals("identity")
            assert (totals.arrived, totals.rows) == (1, 6)

    run(main())


def test_requests_that_waited_while_the_server_stood_still_are_no_rate_of_a_moment(tmp_path: Path) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            driver, fed = intercepted(asking.server)
            assert driver._timer is not None
            driver._timer.cancel()
            await asyncio.gather(*driver._tasks)
            now = driver._observed_at
            driver._clock = lambda: now
            answers: list[InferResponse | RequestError] = []

            def look(seconds: float, requests: int) -> None:
                nonlocal now
                now += seconds
                for _ in range(requests):
                    asking.server.infer(InferRequest(model="identity", inputs=(floats(),)), answers.append)
                driver._observe(None)

            fed.clear()
            for seconds, requests in ((0.5, 1), (20.0, 10), (0.5, 25), (0.5, 4), (0.5, 1)):
                look(seconds, requests)
            seen = [(each.seconds, each.offered) for each in fed if isinstance(each, Observed)]
            assert seen == [(0.5, {"identity": 1}), (21.0, {"identity": 39}), (0.5, {"identity": 1})]
            await until(lambda: len(answers) == 41)
            for seconds in (20.0, 0.5, 0.5):
                look(seconds, 0)
            late = fed[-1]
            assert isinstance(late, Observed) and not (late.latencies or late.stayed or late.within_target)
            fed.clear()
            for _ in range(6):  # it is never quick enough
                look(2.0, 1)
                await until(lambda: len(answers) == asking.server._driver.arrived["identity"])
            often = [each for each in fed if isinstance(each, Observed)]
            assert [each.seconds for each in often] == [6.0, 6.0] and often[0].stayed and not often[1].stayed

    run(main())


def test_command_that_fails_is_told_to_the_controller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server = asking.server
            assert server._adaptation is not None and server._adaptation._adapting is not None
            driver, plan = server._adaptation._adapting, server.deployment.plan
            solve = Solve(number=7, rates={"identity": 20.0}, current=plan, devices=())
            rolled = Roll(8, plan, {"identity": 20.0}, "now")
            commands: list[ControllerCommand] = [solve, rolled, Acquire("cpu", 2), Release(())]
            fed: list[object] = []

            def failing(*_: object, **__: object) -> None:
                raise RuntimeError("it cannot be done")

            def handle(event: ControllerEvent, now: float) -> list[ControllerCommand]:
                fed.append(event)
                return commands if isinstance(event, DevicesFound) else []

            log, driver._log = driver._log, lambda *_: None  # what follows is not of the server's own controller
            driver.controller.handle = handle  # type: ignore[method-assign]
            for taker, name in ((driver, "_answered"), (driver._rollouts, "request"), (driver._provider, "handle")):
                setattr(taker, name, failing)
            driver.feed(DevicesFound(()))
            told = [event for event in fed if not isinstance(event, Observed | DevicesFound)]
            reason = "RuntimeError: it cannot be done"
            assert told == [
                Solved(number=7, error=reason),
                RollEnded(number=8, outcome=RolloutOutcome.REJECTED, reason=reason),
                AcquisitionFailed("cpu", 2, reason),
            ]
            del driver.controller.handle, driver._answered, driver._rollouts.request
            driver._log = log

    run(main())
    assert caplog.text.count("a command was not carried out") == 4


def test_batches_grow_back_after_a_smaller_plan_and_callers_notice_nothing(tmp_path: Path) -> None:
    """How many rows callers may send does not move with the plan; how many run at once does."""

    async def main() -> None:
        async with adaptive(tmp_path, 10.0) as asking:
            server, given = asking.server, asking.given

            def batched(batch: int) -> Deployment:
                _, desired = server._rollouts.desired
                (device,) = given.plan.devices
                placement = msgspec.structs.replace(device.partitions[0].placements[0], batch=batch)
                partition = msgspec.structs.replace(device.partitions[0], placements=(placement,))
                plan = msgspec.structs.replace(
                    given.plan, devices=(msgspec.structs.replace(device, partitions=(partition,)),)
                )
                return msgspec.structs.replace(desired, plan=plan)

            own = server.model("identity").max_batch_size
            for batch in (1, 4):
                await server.apply(batched(batch))
                assert server.model("identity").max_batch_size == own > 4
                assert server.config("identity")["dynamic_batching"]["preferred_batch_size"] == [batch]

    run(main())
