"""The recommender over gRPC, with gRPC's own client."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cotenant.core.profile import write_profiles
from cotenant.errors import StateConflictError, StateError
from cotenant.k8s.pods.catalogue import Catalogue
from cotenant.k8s.recommender.client import Recommendation, RecommenderClient
from cotenant.k8s.recommender.matrices import Matrices
from cotenant.k8s.recommender.service import RecommenderService
from cotenant.k8s.recommender.state import State
from cotenant.live.access import Access, Role
from cotenant.predictors.samples import Sample, write_samples
from cotenant.protocol.recommender import SERVICE, recommender
from tests.k8s.eventually import eventually
from tests.k8s.recommender.measured import LOSS, PAIRS, load, profile
from tests.k8s.recommender.test_state import redis_server

PROFILES = (profile("a"), profile("b"), profile("c"))
ALL = Matrices(PROFILES, tuple(PAIRS))


class Memory:
    """A store in memory. before: what to do before the next write."""

    def __init__(self) -> None:
        self.state = State({}, "")
        self.fault: Exception | None = None

    async def read(self) -> State:
        return self.state

    async def write(self, texts: Any, version: str) -> str:
        if self.fault is not None:
            raise self.fault
        if version != self.state.version:
            raise StateConflictError("changed")
        self.state = State(dict(texts), str(int(version or "0") + 1))
        return self.state.version


class Caller:
    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)

    async def __call__(self, name: str, **fields: Any) -> Any:
        kind, answer = getattr(recommender, f"{name}Request"), getattr(recommender, f"{name}Response")
        call = self.channel.unary_unary(
            f"/{SERVICE}/{name}", request_serializer=kind.SerializeToString, response_deserializer=answer.FromString
        )
        return await call(kind(**fields), timeout=20)

    async def fails(self, name: str, **fields: Any) -> str:
        """Make a call that fails; return its status and message."""
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self(name, **fields)
        return f"{failed.value.code().name}: {failed.value.details()}"


def message(of: Any) -> Any:
    return recommender.Load(model=of.model, kind=of.kind, batch=of.batch, share_pct=of.share / 10)


def told(each: Sample) -> Any:
    return recommender.Sample(
        victim=message(each.victim),
        colocated=[message(one) for one in each.colocated],
        alone_ms=each.alone * 1e3,
        together_ms=each.together * 1e3,
    )


@asynccontextmanager
async def serving(service: RecommenderService, access: Access | None = None) -> AsyncIterator[tuple[Caller, str]]:
    listener = service.listener(access=access)
    address = f"127.0.0.1:{await listener.listen('127.0.0.1', 0)}"
    caller = Caller(address)
    try:
        yield caller, address
    finally:
        await caller.channel.close()
        await listener.stop(1.0)


def run(main: Any) -> None:
    uvloop.run(asyncio.wait_for(main, 100))


def test_calls_answer_by_what_was_measured() -> None:
    async def main() -> None:
        async with serving(RecommenderService(ALL)) as (call, _):
            isolated = await call("Isolated", model="a", kind="gpu", share_pct=50, slo_ms=20)
            assert (round(isolated.qps), isolated.batch, isolated.measured) == (400, 4, True)
            answer = await call("Interference", victim=message(load("a")), colocated=[message(load("c"))])
            assert answer.slowdown == pytest.approx(1 / (1 - LOSS["c"]), rel=1e-3)
            assert answer.lost == pytest.approx(LOSS["c"], rel=1e-3)

    run(main())


def test_with_tokens_only_callers_with_one_are_answered() -> None:
    token = "a-token-of-a-test"  # noqa: S105

    async def main() -> None:
        async with serving(RecommenderService(ALL), Access({Role.INFER: [token]})) as (call, address):
            asked: dict[str, Any] = {"model": "a", "kind": "gpu", "share_pct": 50, "slo_ms": 20}
            assert "UNAUTHENTICATED: this server asks for a token" in await call.fails("Isolated", **asked)
            assert "UNAUTHENTICATED" in await call.fails("Observe", samples=[told(PAIRS[0])])
            stranger, client = (RecommenderClient(address, token=given) for given in ("another-token-of-it", token))
            with pytest.raises(grpc.aio.AioRpcError, match="does not know the token"):
                await stranger.fetch()
            found = await client.fetch()
            assert found is not None and found.revision == ALL.revision
            await stranger.close()
            await client.close()
            channel = grpc.aio.insecure_channel(address)
            healthy = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert healthy.status == health_pb2.HealthCheckResponse.SERVING
            await channel.close()

    run(main())


def test_wrong_questions_are_invalid_arguments() -> None:
    async def main() -> None:
        async with serving(RecommenderService(ALL)) as (call, _):
            for fields, said in (
                ({"model": "x", "kind": "gpu", "share_pct": 50, "slo_ms": 20}, "nothing was measured of model 'x'"),
                (
                    {"model": "a", "kind": "gpu", "share_pct": 0, "slo_ms": 20},
                    "share_pct: a share of 0 % must be above",
                ),
                ({"model": "a", "kind": "gpu", "share_pct": 50, "slo_ms": 0}, "slo_ms: 0 must be above 0"),
            ):
                assert f"INVALID_ARGUMENT: {said}" in await call.fails("Isolated", **fields)
            unknown = recommender.Load(model="x", kind="gpu", batch=1, share_pct=50)
            assert "INVALID_ARGUMENT" in await call.fails(
                "Interference", victim=unknown, colocated=[message(load("a"))]
            )
            odd = recommender.Sample(victim=message(load("a")), alone_ms=1, together_ms=2)
            assert "INVALID_ARGUMENT" in await call.fails("Observe", samples=[odd])
            raw: Any = call.channel.unary_unary(f"/{SERVICE}/Isolated")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await raw(b"\xff\xff", timeout=20)
            assert failed.value.code() is grpc.StatusCode.INTERNAL

    run(main())


def test_observe_learns_and_keeps_it() -> None:
    async def main() -> None:
        store = Memory()
        service = RecommenderService(Matrices(PROFILES), store)
        async with serving(service) as (call, _):
            first = await call("Observe", samples=[told(PAIRS[0])])  # too few to predict, but kept
            assert first.samples == 1
            more = await call("Observe", samples=[told(each) for each in PAIRS])
            assert more.samples == 9 and more.revision != first.revision
            answer = await call("Interference", victim=message(load("b")), colocated=[message(load("c"))])
            assert answer.lost == pytest.approx(LOSS["c"], rel=1e-3)
        again = Matrices.read(store.state.texts)
        assert again.revision == service.matrices.revision

    run(main())


def test_observe_beside_another_that_learns_keeps_both() -> None:
    async def main() -> None:
        store = Memory()
        services = [RecommenderService(Matrices(PROFILES), store) for _ in range(2)]
        async with serving(services[0]) as (one, _), serving(services[1]) as (other, _):
            await one("Observe", samples=[told(each) for each in PAIRS[:5]])
            answer = await other("Observe", samples=[told(each) for each in PAIRS[5:]])
            assert answer.samples == 9
        assert len(Matrices.read(store.state.texts).samples) == 9

    run(main())


def test_observe_that_cannot_be_kept_learns_nothing() -> None:
    async def main() -> None:
        store = Memory()
        service = RecommenderService(ALL, store)
        async with serving(service) as (call, _):
            store.fault = StateError("away")
            extra = Sample(load("a"), (load("b"),), 0.01, 0.011)
            assert await call.fails("Observe", samples=[told(extra)]) == "UNAVAILABLE: away"
            store.fault = StateConflictError("changed")
            assert "others have written what is kept 5 times" in await call.fails("Observe", samples=[told(extra)])
        assert service.matrices == ALL

    run(main())


def test_client_follows_what_is_learnt_and_outlives_the_service() -> None:
    async def main() -> None:
        found: list[Recommendation] = []
        service = RecommenderService(Matrices(PROFILES, tuple(PAIRS[:6])))
        async with serving(service) as (call, address):
            client = RecommenderClient(address)
            following = asyncio.create_task(client.follow(found.append, 0.02))
            await eventually(lambda: len(found) == 1)
            assert found[0].revision == service.matrices.revision
            await call("Observe", samples=[told(each) for each in PAIRS])
            await eventually(lambda: len(found) == 2)
            assert await client.fetch(found[1].revision) is None
        await asyncio.sleep(0.1)
        assert not following.done() and len(found) == 2
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client.close()
        catalogue = Catalogue([], found[1].profiles, found[1].interference)
        assert catalogue.profiles["a", "gpu"].points == profile("a").points
        assert found[1].interference.slowdown(load("a"), (load("c"),)) == pytest.approx(1.25, rel=1e-3)

    run(main())


def test_command_keeps_what_it_learns_over_a_restart(tmp_path: Path) -> None:
    (tmp_path / "profiles.csv").write_text(write_profiles(PROFILES))
    (tmp_path / "pairs.csv").write_text(write_samples(PAIRS))

    @asynccontextmanager
    async def command(*options: str) -> AsyncIterator[Caller]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cotenant", "recommender", "--port=0", "--json", *options),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            line = b""
            while not line.rstrip().endswith(b"}"):
                more = await process.stdout.readline()
                assert more, "it ended"
                line += more
            caller = Caller(json.loads(line)["address"])
            yield caller
            await caller.channel.close()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def main(url: str) -> None:
        async with command(f"--state={url}", f"--profiles={tmp_path}/profiles.csv") as call:
            assert (await call("Observe", samples=[told(each) for each in PAIRS])).samples == 9
        async with command(f"--state={url}") as call:
            answer = await call("Interference", victim=message(load("a")), colocated=[message(load("c"))])
            assert answer.lost == pytest.approx(LOSS["c"], rel=1e-3)

    with redis_server() as url:
        run(main(url))
