"""Who gets a session with a node, and what becomes of one: handshakes, leases, cuts, and what no peer would send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.backends.none import NoDevices
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.errors import ConfigError, NodeError
from cotenant.live.nodes import link as link_module
from cotenant.live.nodes import node as node_module
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.credentials import check_guarded, known_token, new_nonce, prove, split_address
from cotenant.live.nodes.link import MAGIC, Link, Receiver
from cotenant.live.nodes.messages import PROTOCOL, Challenge, Goodbye, Hello, Message, Ping, Pong, Proof, Welcome
from cotenant.live.nodes.node import NodeSettings, check_welcome
from cotenant.live.nodes.registry import Nodes
from cotenant.live.nodes.session_pool import SessionPool
from tests.cli.program import workers_of
from tests.live.nodes.agents import TOKEN, RunningAgent, agent_of, nodes_of, reason, remote_pool, tls_context, up
from tests.live.workers import PATIENCE, floats, sleeper
from tests.worker import graphs

LANE = LaneId(DeviceId("fake", node="node-a"), 0)
_PREFIX = struct.Struct("<4sIQ")


# Tokens, versions, certificates


def test_session_with_the_same_token_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            agent_of(Fake(), tmp_path, tokens=["an older token of this node", TOKEN]) as agent,
            nodes_of(agent.address, tokens=(TOKEN,)) as nodes,
        ):
            node = await up(nodes)
            assert agent.agent.front_end.startswith(socket.gethostname())
            assert 0 < node.round_trip < PATIENCE, "plans need it at once"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ([TOKEN], ("another token of a test",), "does not know this node's token; give both the same"),
        ([TOKEN], (), "it asks for a token, and there is none here; set cluster.token"),
        ([], (TOKEN,), "it has no token, and so cannot prove that it is the node"),
    ],
)
def test_session_with_another_token_is_refused_with_words(
    theirs: list[str], ours: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path, tokens=theirs) as agent, nodes_of(agent.address, tokens=ours) as nodes:
            told = await reason(nodes, words)
            assert told.startswith(f"node-a ({agent.address}) does not serve this front end: ")
            assert TOKEN not in told and "certificate" not in told
            assert not agent.agent.front_end

    asyncio.run(scenario())


def test_nodes_that_keep_shares_alike_are_told_of_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            agent_of(Fake(), tmp_path / "a") as first,
            agent_of(Fake(), tmp_path / "b") as second,
            agent_of(Cpu(), tmp_path / "c") as third,
            nodes_of(first.address, second.address, third.address) as nodes,
        ):
            for name in ("node-a", "node-b", "node-c"):
                await up(nodes, name)
            told = Cluster(NoDevices(), nodes).isolation()
            assert told == f"node-a, node-b: {Fake().isolation()}; node-c: {Cpu().isolation()}"

    asyncio.run(scenario())


def test_node_that_does_not_know_the_token_is_refused(tmp_path: Path) -> None:
    """Anybody may listen on an address; only who proves the token gets what callers send."""

    class Impostor(Receiver):
        def __init__(self) -> None:
            self.link = Link(self, at_node=True)

        def received(self, link: Link, message: Message, body: Any, block: Any) -> None:
            match message:
                case Hello():
                    link.send(Challenge(PROTOCOL, "1", new_nonce(), True))
                case Proof(code):
                    link.send(welcome(code=code))  # what it was sent proves nothing of itself

        def link_lost(self, link: Link, reason: str) -> None:
            pass

    async def scenario() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Impostor().link, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with nodes_of(f"{host}:{port}", tokens=(TOKEN,)) as nodes:
            await reason(nodes, "it does not know the token, and so may be anybody")
            node = nodes.get("node-a")
            assert node is not None and not node.is_up and not node.sessions
        server.close()

    asyncio.run(scenario())


def test_proofs_differ_by_end_and_by_number() -> None:
    ours, theirs = new_nonce(), new_nonce()
    code = prove(TOKEN, "front end", ours, theirs)
    assert known_token(["x" * 20, TOKEN], code, "front end", ours, theirs) == TOKEN
    assert known_token([TOKEN], code, "node", ours, theirs) is None
    assert known_token([TOKEN], code, "front end", theirs, ours) is None
    assert known_token([TOKEN], b"", "front end", ours, theirs) is None


def test_other_version_is_refused_by_the_node_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "PROTOCOL", PROTOCOL + 1)

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            told = await reason(nodes, f"speaks version {PROTOCOL} of the protocol; the front end runs")
            assert told.endswith(f"and speaks {PROTOCOL + 1}: install the same on both")

    asyncio.run(scenario())


def test_mutual_certificates_are_needed_and_enough(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()

    def context(purpose: ssl.Purpose, by: trustme.CA | None, trusts: trustme.CA = authority) -> ssl.SSLContext:
        return tls_context(purpose, by, trusts)

    async def scenario() -> None:
        theirs = context(ssl.Purpose.CLIENT_AUTH, authority)
        async with agent_of(Cpu(), tmp_path / "cache", tls=theirs) as agent:
            for by in (None, other):
                async with nodes_of(agent.address, tls=context(ssl.Purpose.SERVER_AUTH, by)) as nodes:
                    await reason(nodes, "has the authority that it names (cluster.authority) signed the certificate")
                    node = nodes.get("node-a")
                    assert node is not None
                    await asyncio.sleep(0.2)
                    assert not node.sessions
            async with nodes_of(agent.address) as nodes:
                await reason(nodes, "if it has certificates, set cluster.certificate, key and authority here, too")
            async with nodes_of(agent.address, tls=context(ssl.Purpose.SERVER_AUTH, authority, other)) as nodes:
                await reason(nodes, "its certificate is not one that cluster.authority has signed")
            async with (
                agent_of(Cpu(), tmp_path / "clear") as clear,
                nodes_of(clear.address, tls=context(ssl.Purpose.SERVER_AUTH, authority)) as nodes,
            ):
                await reason(nodes, "it does not use TLS; give certificates")
            async with nodes_of(agent.address, tls=context(ssl.Purpose.SERVER_AUTH, authority)) as nodes:
                await up(nodes)
                async with remote_pool(nodes) as (pool, told):
                    lane = LaneId(DeviceId("cpu", node="node-a"), 0)
                    await pool.start(lane, share=500, models=[graphs.identity(tmp_path / "m.onnx", 50_000)])
                    await told.next()
                    pool.run(lane, 1, "identity", [floats(*range(50_000), width=50_000)])
                    assert (await told.next())[0] == "finished"

    asyncio.run(scenario())


def test_address_beyond_this_machine_needs_a_guard() -> None:
    async def scenario() -> None:
        nodes = Nodes(NodeSettings())
        with pytest.raises(
            ConfigError, match=r"^node b: 10\.0\.0\.2 can be reached from other machines.*set cluster\.token"
        ):
            nodes.add("b", "10.0.0.2:8010")
        await nodes.close()

    asyncio.run(scenario())
    check_guarded("10.0.0.2", "node", guarded=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_guarded(host, "node", guarded=False)


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "a" * 300, "ä"])
def test_node_with_an_unspellable_name_is_rejected(name: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="is not a valid node name"):
            Nodes(NodeSettings()).add(name, "127.0.0.1:8010")

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:70000", "a:b", "::1:80", "a:\u0661"])
def test_address_that_is_none_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of a node; write HOST:PORT"):
        split_address(address)
    assert split_address("[::1]:80") == ("::1", 80)


# One front end at a time


def test_second_front_end_is_refused_until_the_first_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as first:
            await up(first)
            monkeypatch.setattr(node_module, "FRONT_END", "another process, somewhere")
            async with nodes_of(agent.address) as second:
                told = await reason(second, "a node serves one front end at a time")
                assert socket.gethostname() in told
                node = first.get("node-a")
                assert node is not None and node.is_up and node.sessions == 1
                await first.close()
                await up(second)

    asyncio.run(scenario())


def test_node_that_is_listed_under_two_names_serves_as_the_first(tmp_path: Path) -> None:
    """Its devices have one owner: were the session handed back and forth, neither would serve."""

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            first = await up(nodes)
            nodes.add("node-b", f"localhost:{agent.port}")
            await reason(nodes, "this front end has this node already, as node-a", "node-b")
            assert first.is_up and first.sessions == 1
            nodes.remove("node-a")
            await up(nodes, "node-b")

    asyncio.run(scenario())


class Gpu(Fake):
    """A fake device that two agents of one machine may both offer."""

    def hardware_ids(self) -> tuple[str, ...]:
        return ("GPU-1",)


def test_device_that_two_nodes_claim_is_the_firsts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            agent_of(Gpu(), tmp_path / "a") as one,
            agent_of(Gpu(), tmp_path / "b") as other,
            nodes_of(one.address) as nodes,
        ):
            first = await up(nodes)
            nodes.add("node-b", other.address)
            await reason(nodes, "its device GPU-1 is used by node-a already", "node-b")
            assert first.is_up and first.sessions == 1
            nodes.remove("node-a")
            await up(nodes, "node-b")

    asyncio.run(scenario())


def test_device_of_the_server_itself_is_no_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        nodes = Nodes(NodeSettings(), ["GPU-1"])
        async with agent_of(Gpu(), tmp_path) as agent:
            nodes.add("node-a", agent.address)
            await reason(nodes, "its device GPU-1 is used by this server itself already")
            node = nodes.get("node-a")
            assert node is not None and not node.is_up and not node.sessions
            await nodes.close()

    asyncio.run(scenario())


def test_front_end_that_goes_leaves_a_node_that_ends_its_workers_and_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent:
            for _ in range(2):
                async with nodes_of(agent.address) as nodes:
                    node = await up(nodes)
                    async with remote_pool(nodes) as (pool, told):
                        await pool.start(LANE, share=500, models=[sleeper(0.3)])
                        await told.next()
                        pool.run(LANE, 1, "sleeper", [floats(1, 2)])
                        node.link.abort("the front end dies")
                        what, lane, why = await told.next()
                        assert (what, lane) == ("died", LANE) and "node-a is cut off" in why
                        await nodes.close()
                async with asyncio.timeout(PATIENCE):
                    while agent.agent.front_end or workers_of(os.getpid()):
                        await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_batches_do_not_look_through_the_models_of_all_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        looks = 0
        folders = vars(SessionPool)["folders"]

        def counted(pool: SessionPool) -> object:
            nonlocal looks
            looks += 1
            return folders.fget(pool)

        monkeypatch.setattr(SessionPool, "folders", property(counted))
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[sleeper(0.001)])
                await told.next()
                before = looks
                assert before
                for number in range(5):
                    pool.run(LANE, number, "sleeper", [floats(1, 2)])
                    assert (await told.next())[0] == "finished"
                assert looks == before

    asyncio.run(scenario())


def test_lanes_of_a_node_that_is_back_are_restarted_and_late_answers_do_not_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[sleeper(0.5)])
                await told.next()
                pool.run(LANE, 1, "sleeper", [floats(1, 2)])
                node.link.abort("the network breaks")
                assert (await told.next())[0] == "died"
                assert pool.status()[0].state == "lost"
                await up(nodes, sessions=2)
                assert await told.next() == ("ready", LANE)
                pool.run(LANE, 2, "sleeper", [floats(3, 4)])
                what, _, batch, answers, _ = await told.next()
                assert (what, batch) == ("finished", 2) and answers[0][0].array().tolist() == [[3, 4]]

    asyncio.run(scenario())


def test_node_that_is_silent_is_cut_off_within_a_second(tmp_path: Path) -> None:
    """Its process is stopped, as one is that the kernel does not run, and its connection stays open."""

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            loop = asyncio.get_running_loop()
            assert node._dialling is not None
            node._dialling.cancel()  # it is to stay cut off
            (session,) = agent.agent._sessions
            assert session.link._transport is not None and session.link._timer is not None
            session.link._timer.cancel()  # or it might be the first to say that nothing was heard
            session.link._transport.pause_reading()
            session.link.send = lambda message, body=(): None  # type: ignore[method-assign]
            began = loop.time()
            async with asyncio.timeout(PATIENCE):
                while node.is_up:
                    await asyncio.sleep(0.005)
            assert loop.time() - began > link_module.SILENCE / 2
            assert "nothing was heard for" in node.reason

    asyncio.run(scenario())


def test_node_that_was_removed_is_lost_and_may_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent, nodes_of(agent.address) as nodes:
            changes: list[int] = []
            nodes.on_session = lambda: changes.append(len(nodes.fleet()))
            await up(nodes)
            assert changes == [1]
            nodes.remove("node-a")
            assert nodes.lost() == {LANE.device: "node-a was removed"} and not nodes.fleet()
            nodes.add("node-a", agent.address)
            await up(nodes)
            assert changes == [1, 0, 1] and nodes.lost() == {}

    asyncio.run(scenario())


# What no peer would send


class Peer(Receiver):
    """An end of a link that a test speaks for."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link = Link(self, at_node=False)

    def received(self, link: Link, message: Message, body: Any, block: Any) -> None:
        self.said.put_nowait(message)

    def link_lost(self, link: Link, reason: str) -> None:
        self.over.set_result(reason)


async def begun(agent: RunningAgent) -> Peer:
    """A session that a test speaks for."""
    peer = Peer()
    await asyncio.get_running_loop().create_connection(lambda: peer.link, "127.0.0.1", agent.port)
    peer.link.send(Hello(PROTOCOL, "1", "f" * 16, "here", new_nonce()))
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await peer.said.get(), Challenge)
        peer.link.send(Proof(b""))
        assert isinstance(await peer.said.get(), Welcome)
    peer.link.begun = True
    return peer


def frame(head: bytes, *, magic: bytes = MAGIC, size: int | None = None, body: int = 0) -> bytes:
    return _PREFIX.pack(magic, len(head) if size is None else size, body) + head


HELLO = msgspec.msgpack.encode(Hello(PROTOCOL, "1", "f" * 16, "here", bytes(32)))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", "this is not a connection between a front end and a node"),
        (bytes(range(7, 71)), "this is not a connection between a front end and a node"),
        (frame(b"", size=1 << 31), "a head of 2147483648"),
        (frame(HELLO, body=1 << 62), "a body of 4611686018427387904 bytes"),
        (frame(b"\xc1\xff"), "malformed frame"),
        (frame(b"\x91" * 2000), "malformed frame"),
        (frame(msgspec.msgpack.encode(["Hello", 1, 2, 3, 4, 5])), "malformed frame"),
        (
            frame(msgspec.msgpack.encode(["Hello", 1, "0", "f" * 16, "here", bytes(32)])),
            "and speaks 1: install the same",
        ),
        (
            frame(msgspec.msgpack.encode(["Hello", 9, "9", "f" * 16, "here", bytes(32), "a", "b"])),
            "and speaks 9: install",
        ),
        (frame(msgspec.msgpack.encode(Ping(1))), None),
        (frame(msgspec.msgpack.encode(Pong(1))), "it answered a ping that it was not sent"),
        (frame(msgspec.msgpack.encode(Proof(b""))), "Proof came before the handshake"),
        (frame(msgspec.msgpack.encode(["ClosePool", 0])), "ClosePool came before the handshake"),
        (frame(HELLO) + frame(HELLO), "Hello came before the handshake"),
        (frame(HELLO)[:30], None),
        (b"", None),
    ],
)
def test_node_ends_a_connection_that_sends_nonsense_and_serves_the_next(
    sent: bytes, words: str | None, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent:
            reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                got = await reader.read()
            writer.close()
            if words is not None:
                assert words.encode() in got
            async with nodes_of(agent.address) as nodes:
                await up(nodes)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        lambda: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda: os.urandom(100),
        lambda: frame(b"", size=1 << 31),
        lambda: frame(b"\xc1"),
        lambda: frame(msgspec.msgpack.encode(Proof(b""))),
        lambda: frame(msgspec.msgpack.encode(["Observed", 0, [], 0, {}])),
        lambda: frame(msgspec.msgpack.encode(Challenge(PROTOCOL, "1", b"", False)))[:20],
    ],
)
def test_front_end_survives_a_node_that_sends_nonsense(answer: Callable[[], bytes]) -> None:
    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer())
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with nodes_of(f"{host}:{port}") as nodes:
            await reason(nodes, "does not serve this front end")
            assert not nodes.fleet() and not nodes.lost()
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


def test_node_that_only_pings_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not silent, and never answers."""
    monkeypatch.setattr("cotenant.live.nodes.node.DIAL_LIMIT", 0.5)

    async def scenario() -> None:
        serving: set[asyncio.Task[Any] | None] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            serving.add(task)
            while not writer.is_closing() and not reader.at_eof():
                writer.write(frame(msgspec.msgpack.encode(Ping(1))))
                await asyncio.sleep(0.05)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with nodes_of(f"{host}:{port}") as nodes:
            await reason(nodes, "no handshake within 0.5 s")
        server.close()
        await asyncio.gather(*filter(None, serving), return_exceptions=True)
        await server.wait_closed()

    asyncio.run(scenario())


def welcome(**changes: Any) -> Welcome:
    fields = {
        "session": "s",
        "code": b"",
        "backend": "fake",
        "kinds": (Kind(name="fake"),),
        "hardware_ids": (),
        "divides": True,
        "isolation": "",
        "isolation_of_profiles": "",
        "capacity": "",
        "machine": "",
    }
    return Welcome(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": ()},
        {"kinds": (Kind(name="a"), Kind(name="a"))},
        {"kinds": (Kind(name="a/b"),)},
        {"kinds": (Kind(name="a", count=None),)},
        {"kinds": (Kind(name="a", count=1 << 20),)},
        {"kinds": (Kind(name="a", cuts=(500, 100)),)},
        {"kinds": (Kind(name="a", cuts=(0, 100)),)},
        {"kinds": (Kind(name="a", cuts=(1001,)),)},
        {"kinds": (Kind(name="a", memory=-1),)},
        {"kinds": (Kind(name="a", processors=float("nan")),)},
        {"isolation": "x" * 5000},
        {"hardware_ids": ("x" * 5000,)},
        {"hardware_ids": ("x",) * 70_000},
    ],
)
def test_devices_that_no_machine_has_are_refused(changes: dict[str, Any]) -> None:
    check_welcome(welcome())
    with pytest.raises(NodeError, match=r"^it says"):
        check_welcome(welcome(**changes))


def test_goodbye_ends_a_session_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path) as agent:
            peer = await begun(agent)
            peer.link.send(Goodbye("enough"))
            assert "closed the connection" in await asyncio.wait_for(peer.over, PATIENCE)
            async with asyncio.timeout(PATIENCE):
                while agent.agent.front_end:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
