"""What a front end that has proven itself may still not do to a node, and a node not to its front end."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotenant.backends.fake import Fake
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import TensorSpec
from cotenant.live.nodes import messages
from cotenant.live.nodes.messages import Message, ModelFile, ModelState, NodeModel, OfferModel, SendFile
from cotenant.live.nodes.model_files import digest_of
from cotenant.worker.wire import TensorPart, Timing
from tests.live.nodes.agents import agent_of, nodes_of, remote_pool, up
from tests.live.nodes.test_sessions import LANE, Peer, begun
from tests.live.workers import PATIENCE, floats, sleeper

LOCAL = LaneId.parse("fake-0/0")
MODEL = sleeper(0.01, max_batch=2)
SPAWN = messages.Spawn(0, LOCAL, 1, 500, (NodeModel(MODEL, b""),), True, (), False)
BATCH = messages.Batch(0, LOCAL, 1, "sleeper", [[TensorPart("x", "FP32", (1, 2), memoryview(bytes(8)))]])


def spawn(**changes: Any) -> messages.Spawn:
    return msgspec.structs.replace(SPAWN, **changes)


def model(**changes: Any) -> tuple[NodeModel, ...]:
    return (NodeModel(msgspec.structs.replace(MODEL, **changes), b""),)


def batch(*parts: TensorPart, **changes: Any) -> messages.Batch:
    return msgspec.structs.replace(BATCH, **({"requests": [list(parts)]} if parts else {}), **changes)


def part(**changes: Any) -> TensorPart:
    fields: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": (1, 2), "data": memoryview(bytes(8))}
    return TensorPart(**{**fields, **changes})


async def refused(peer: Peer, message: Message, body: tuple[bytes, ...] = ()) -> str:
    """Send a command; return why the node ends the session."""
    peer.link.send(message, body)
    return await asyncio.wait_for(peer.over, PATIENCE)


async def next_of(peer: Peer, kind: type[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not isinstance(said := await peer.said.get(), kind):
            pass
    return said


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (messages.Promote(7, LOCAL, 1), "Promote is for a pool that is not open"),
        (messages.OpenPool(0, False), "pool 0 is open already"),
        (spawn(lane=LaneId.parse("fake-1/0")), "this node has no device fake-1"),
        (spawn(lane=LaneId.parse("node-a/fake-0/0")), "this node has no device node-a/fake-0"),
        (spawn(share=0), "a share of 0 ‰"),
        (spawn(share=1001), "a share of 1001 ‰"),
        (spawn(models=()), "and 0 models"),
        (spawn(models=model(max_batch=1 << 30)), "has batches of 1073741824"),
        (spawn(models=model(inputs=(TensorSpec("x", "FP32", (1,) * 40),))), "or one of many ranks"),
        (spawn(models=model(path="/etc/passwd")), "model 'sleeper' was not offered"),
        (messages.Retire(0, LOCAL, 1, float("inf")), "a grace of inf s"),
        (batch(), "for model 'sleeper', which is not on fake-0/0"),
        (SendFile(b"", 0, 0), "a part of a model was sent that was not asked for"),
    ],
)
def test_command_that_no_front_end_sends_ends_the_session(message: Message, words: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent:
            peer = await begun(agent)
            peer.link.send(messages.OpenPool(0, False))
            assert words in await refused(peer, message)
            async with nodes_of(agent.address) as nodes:
                await up(nodes)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("message", "body", "words"),
    [
        (batch(part(name="y")), (), "unexpected input 'y'"),
        (batch(part(), part()), (), "unexpected input 'x'"),
        (batch(part(datatype="INT32")), (), "input 'x' is INT32"),
        (batch(part(datatype="FP8")), (), "is 'FP8', which is not a datatype"),
        (batch(part(shape=(1, 3), data=memoryview(bytes(12)))), (), "has shape [1, 3]"),
        (batch(part(shape=(-1, -2))), (), "a name, a rank or a size that no tensor has"),
        (batch(part(shape=(1,) * 40)), (), "a name, a rank or a size that no tensor has"),
        (batch(part(shape=(1 << 40, 2))), (), "rows"),
        (batch(part(data=memoryview(bytes(7)))), (), "7 bytes, but FP32"),
        (batch(part(data=None, size=8)), (), "lies outside of its frame"),
        (batch(part(data=None, start=4, size=8)), (bytes(8),), "lies outside of its frame"),
        (batch(part(data=None, start=-8, size=8)), (bytes(8),), "lies outside of its frame"),
        (batch(part(data=None, start=8, size=-8)), (bytes(8),), "lies outside of its frame"),
        (msgspec.structs.replace(BATCH, requests=BATCH.requests * 3), (), "a batch of 3 rows"),
        (msgspec.structs.replace(BATCH, requests=[]), (), "a batch of 0 rows"),
        (SPAWN, (), "worker 1 of fake-0/0 was spawned before"),
    ],
)
def test_batch_that_no_model_takes_ends_the_session(
    message: Message, body: tuple[bytes, ...], words: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent:
            peer = await begun(agent)
            peer.link.send(messages.OpenPool(0, False))
            peer.link.send(SPAWN)
            await next_of(peer, messages.Ready)
            peer.link.send(BATCH)
            assert len((await next_of(peer, messages.Answers)).requests) == 1
            assert words in await refused(peer, message, body)

    asyncio.run(scenario())


# Models


def listed(*files: tuple[str, bytes]) -> OfferModel:
    entries = tuple(ModelFile(path, len(data), sha256(data)) for path, data in files)
    return OfferModel(digest_of(entries), "model", entries)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    "path", ["/etc/cron.d/x", "../x", "a/../../x", "a//b", "./a", "", "a\0b", "a\\b", "x" * 2000, "a/" * 20 + "b"]
)
def test_model_that_leads_out_of_its_folder_is_refused(path: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path / "cache") as agent:
            peer = await begun(agent)
            peer.link.send(listed((path, b"data")))
            state = await next_of(peer, ModelState)
            assert not state.wanted and "is not a path of a file within a model's folder" in state.reason
            assert not peer.link.is_over

    asyncio.run(scenario())
    assert [path.name for path in tmp_path.rglob("*")] == ["cache"]


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (msgspec.structs.replace(listed(("a", b"1")), digest=bytes(32)), "is not what its hash says"),
        (OfferModel(digest_of(()), "model", ()), "is not what its hash says"),
        (listed(("a", b"1"), ("a", b"2")), "names one twice, or a folder as a file"),
        (listed(("a", b"1"), ("a/b", b"2")), "names one twice, or a folder as a file"),
        (listed(("a", bytes(2000))), "this node keeps 1000 B of models; raise node.cache_size"),
    ],
)
def test_model_that_is_none_is_refused(offer: OfferModel, words: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path, bound=1000) as agent:
            peer = await begun(agent)
            peer.link.send(offer)
            state = await next_of(peer, ModelState)
            assert not state.wanted and words in state.reason

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0, 0, b"1234")], "what was sent is not what its hash says"),
        ([(1, 0, b"abcd")], "not the next one"),
        ([(0, 2, b"cd")], "not the next one"),
        ([(0, 0, b"ab"), (0, 0, b"ab")], "not the next one"),
        ([(0, 0, b"abcde")], "more, or less, was sent"),
        ([(0, 0, b"")], "more, or less, was sent"),
    ],
)
def test_file_that_is_not_what_was_offered_is_refused_and_forgotten(
    parts: list[tuple[int, int, bytes]], words: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        offer = listed(("a", b"abcd"))
        async with agent_of(Fake(), tmp_path) as agent:
            peer = await begun(agent)
            peer.link.send(offer)
            assert (await next_of(peer, ModelState)).wanted
            for file, offset, data in parts:
                peer.link.send(SendFile(offer.digest, file, offset), (data,) if data else ())
                state = await next_of(peer, ModelState)
            assert not state.wanted and words in state.reason
            assert list(tmp_path.iterdir()) == []
            peer.link.send(offer)  # it may be sent again
            assert (await next_of(peer, ModelState)).wanted
            peer.link.send(SendFile(offer.digest, 0, 0), (b"abcd",))
            state = await next_of(peer, ModelState)
            assert not state.wanted and not state.reason
        assert (tmp_path / offer.digest.hex() / "a").read_bytes() == b"abcd"

    asyncio.run(scenario())


# A node that lies


def answers(**changes: Any) -> messages.Answers:
    timing = Timing(0.0, 0.0, 0.001, 0.0, 0.0, 0.001)
    fields: dict[str, Any] = {"requests": [[TensorPart("y", "FP32", (1, 2), memoryview(bytes(8)))]], "timing": timing}
    return messages.Answers(**{"pool": 0, "lane": LOCAL, "batch": 1, "lasted": 0.001, **fields, **changes})


def output(**changes: Any) -> list[list[TensorPart]]:
    return [[part(**{"name": "y", **changes})]]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (answers(batch=2), "it answered batch 2 of node-a/fake-0/0, which it was not given"),
        (answers(lane=LaneId.parse("fake-0/9")), "which it was not given"),
        (answers(requests=[]), "it answered 0 of 1 requests"),
        (answers(requests=output(name="z")), "has no output 'z' that is FP32"),
        (answers(requests=output(datatype="INT32")), "has no output 'y' that is INT32"),
        (answers(requests=output(shape=(4, 4))), "8 bytes for FP32 of shape [4, 4]"),
        (answers(requests=output(shape=(1 << 60, 0), data=memoryview(b""))), "has more than"),
        (answers(requests=output(data=None, size=1 << 20)), "lies outside of its frame"),
        (answers(requests=[[part(name="y"), part(name="y")]]), "is there twice"),
        (answers(timing=Timing(0.0, float("nan"), 0.0, 0.0, 0.0, 0.0)), "it says that a batch took"),
        (answers(lasted=-1.0), "it says that a batch took"),
        (ModelState(bytes(32), True), "it tells of a model that it was not offered"),
        (messages.Observed(0, (), 0, {LANE.device: "broken"}), "it tells of devices that it does not have"),
    ],
)
def test_node_that_says_what_cannot_be_true_is_cut_off(message: Message, words: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[sleeper(0.3)])
                await told.next()
                (session,) = agent.agent._sessions
                pool.run(LANE, 1, "sleeper", [floats(1, 2)])
                await asyncio.sleep(0.05)
                session.link.send(message)
                what, lane, why = await told.next()
                assert (what, lane) == ("died", LANE) and words in why
                await up(nodes, sessions=2)  # it may be right from now on
                assert await told.next() == ("ready", LANE)

    asyncio.run(scenario())


class Losable(Fake):
    """Its device is lost while `reason` says why."""

    reason = ""

    def lost(self) -> dict[DeviceId, str]:
        return {LOCAL.device: self.reason} if self.reason else {}


def test_device_that_a_node_says_is_lost_is_lost_and_late_answers_do_not_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Losable()
        async with agent_of(backend, tmp_path) as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[sleeper(30.0)])
                await told.next()
                pool.run(LANE, 1, "sleeper", [floats(1, 2)])
                backend.reason = "it fell off the bus"
                what, lane, why = await told.next()
                assert (what, lane) == ("died", LANE) and why.endswith("it fell off the bus")
                (session,) = agent.agent._sessions
                session.link.send(answers())
                backend.reason = ""
                assert await told.next() == ("ready", LANE)
                assert node.sessions == 1

    asyncio.run(scenario())
