"""How a server counts what its front ends reject unread, and what they take of a request's time."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from cotenant.core.request import Outcome
from cotenant.core.tensor import Tensor
from cotenant.errors import InvalidError, NotFoundError, RequestError, UnavailableError
from cotenant.live import inference
from cotenant.live.inference import DUE_INTERVAL, POLL_INTERVAL
from cotenant.live.metrics import render
from cotenant.live.oip import OVERLOADED, InferRequest, InferResponse
from tests.live.deployment import repository
from tests.live.test_server import floats, run, started


def test_requests_rejected_unread_are_in_the_ledger_the_metrics_and_the_status(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            for waited in (0.01, 0.02, 0.03):
                server.reject_unread("identity", waited)
            await asyncio.sleep(0)  # counted together, at the end of the round
            (counts,) = server.statistics("identity")
            assert counts["inference_stats"]["fail"]["count"] == 3
            assert counts["inference_stats"]["fail"]["ns"] >= 60_000_000
            rejected = (
                f'cotenant_rejected_requests_total{{model="identity",outcome="rejected",reason="{OVERLOADED}"}} 3.0'
            )
            assert rejected in render(server.metrics(), "")[0].decode()
            assert (await server.status()).statistics["identity"].outcomes[Outcome.REJECTED.value] == 3
            assert server._driver.arrived["identity"] == server._driver.rows["identity"] == 3, "offered, to a planner"

    run(main())


def test_model_that_nobody_has_is_not_counted_where_it_is_rejected_unread(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            server.reject_unread("whatever", 0.01)
            server.reject_unread("identity", 0.01)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert "whatever" not in server._driver.arrived
            assert server._driver.arrived["identity"] == 1

    run(main())


def test_server_would_reject_what_no_target_leaves_time_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            target = server.deployment.offered["identity"].model.slo
            assert server.shortest_target == target
            assert not server.would_reject("identity", "", 0.0)
            assert server.would_reject("identity", "1", target)
            # Those are for the front end to read, and to answer in their own way.
            assert not server.would_reject("nowhere", "", target)
            assert not server.would_reject("identity", "9", target)
            await server.drain(1.0)
            assert not server.would_reject("identity", "", target)

    run(main())


def test_workers_are_polled_more_often_once_a_full_batch_should_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            polls: list[float] = []
            server._rollouts.poll = lambda: polls.append(now)  # type: ignore[method-assign]
            now = time.monotonic() + 60.0  # which stands still, but for what the test adds
            monkeypatch.setattr(inference, "time", SimpleNamespace(monotonic=lambda: now))

            def count(seconds: float, steps: int = 1000) -> int:
                nonlocal now
                polls.clear()
                for _ in range(steps):
                    now += seconds / steps
                    server.poll()
                return len(polls)

            server._driver.full_batch_due = math.inf
            assert count(0.1) == 0, "no worker has a batch"
            monkeypatch.setattr(type(server._driver), "at_work", True)
            often = count(0.1)
            assert 90 <= often <= 0.1 / POLL_INTERVAL
            server._driver.full_batch_due = now
            assert 3 * often < count(0.1) <= 0.1 / DUE_INTERVAL
            monkeypatch.undo()

    run(main())


def test_time_lost_in_the_front_end_is_taken_from_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            answers: list[InferResponse | RequestError] = []
            target = server.deployment.offered["identity"].model.slo
            server.infer(InferRequest(model="identity", inputs=(floats(),)), answers.append, lost=target)
            await asyncio.sleep(0)
            assert isinstance(answers[0], UnavailableError)

    run(main())


def test_request_whose_model_has_changed_while_a_thread_prepared_it_is_checked_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            service, answers = server._inference, list[InferResponse | RequestError]()
            checked = msgspec.structs.replace(server.deployment.offered["identity"])  # as it was then
            wide = Tensor("x", "FP32", (1, 17), bytes(4 * 17))
            with pytest.raises(InvalidError, match="has shape"):
                service._submit(InferRequest(model="identity", inputs=(wide,)), checked, answers.append, 0.0)
            other = InferRequest(model="identity", version="99", inputs=(floats(),))
            with pytest.raises(NotFoundError, match="version '99' of model 'identity' was replaced"):
                service._submit(other, checked, answers.append, 0.0)
            with pytest.raises(NotFoundError, match="'gone' was unloaded"):
                service._submit(InferRequest(model="gone", inputs=(floats(),)), checked, answers.append, 0.0)
            service._submit(InferRequest(model="identity", inputs=(floats(),)), checked, answers.append, 0.0)
            while not answers:
                await asyncio.sleep(0.001)
            assert isinstance(answers[0], InferResponse)

    run(main())
