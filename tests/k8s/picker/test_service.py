"""The endpoint picker over the network: gRPC's own client with Envoy's own stubs, and servers over HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import trustme
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cotenant.k8s.picker import service
from cotenant.k8s.picker.metrics import PickerMetrics
from cotenant.k8s.picker.picker import EndpointPicker
from cotenant.k8s.picker.poller import ReplicaPoller
from cotenant.k8s.picker.service import PickerService
from cotenant.live.access import Access, Role
from cotenant.live.grpc.misuse import MAX_RAPID, Misuse
from cotenant.live.http import HttpServer
from cotenant.protocol.ext_proc import SERVICE
from tests.k8s.picker import envoy
from tests.k8s.picker.envoy import Mode
from tests.k8s.picker.states import VirtualServer
from tests.live.stub import StubCore

TOKEN = "observe-01234567"  # noqa: S105
PATIENCE = 20.0


class Running:
    """A picker that serves. port: of gRPC."""

    def __init__(self, picker: EndpointPicker, tls: ssl.SSLContext | None = None) -> None:
        self.metrics = PickerMetrics(lambda: picker.ready(time.monotonic()))
        self.listener = PickerService(picker, time.monotonic, self.metrics).listener(tls)
        self.port = 0

    def count(self, decision: str) -> float | None:
        return self.metrics.registry.get_sample_value("cotenant_picker_requests_total", {"decision": decision})


@asynccontextmanager
async def serving(picker: EndpointPicker, tls: ssl.SSLContext | None = None) -> AsyncIterator[Running]:
    running = Running(picker, tls)
    running.port = await running.listener.listen("127.0.0.1", 0)
    try:
        yield running
    finally:
        await running.listener.stop(1.0)


@asynccontextmanager
async def replica(state: Any, **options: Any) -> AsyncIterator[int]:
    """A server that tells an admission state; its port."""
    core = StubCore()
    server = HttpServer(core, admission=state, **options)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop(0.0)
        core.arena.close()


@asynccontextmanager
async def polling(picker: EndpointPicker, *ports: int, **options: Any) -> AsyncIterator[None]:
    names = [("localhost", port) for port in ports]
    task = asyncio.create_task(ReplicaPoller(picker, names, clock=time.monotonic, interval=0.02, **options).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def run(main: Any) -> None:
    uvloop.run(asyncio.wait_for(main, 3 * PATIENCE))


async def exchange(channel: grpc.aio.Channel, *messages: Any, answers: int) -> list[Any]:
    """Send messages as Envoy does, in one call; return so many answers."""
    call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(timeout=PATIENCE)
    for message in messages:
        await call.write(message)
    got = [await call.read() for _ in range(answers)]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    return got


def test_envoy_is_told_where_to_send_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.picker.picker.MAX_AGE", math.inf)

    async def main() -> None:
        picker = EndpointPicker()
        server = VirtualServer({"m": 1.0}, target=5.0)
        async with (
            serving(picker) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            [answer] = await exchange(channel, envoy.headers("/v2/models/m/infer", Mode.NONE), answers=1)
            assert answer.immediate_response.status.code == 503
            async with replica(lambda: server.state(0.0)) as port, polling(picker, port):
                await until(lambda: picker.ready(time.monotonic()))
                head, chunk = await exchange(
                    channel,
                    envoy.headers("/v1/completions", Mode.FULL_DUPLEX_STREAMED),
                    envoy.body(b'{"model": "m"}', last=True),
                    answers=2,
                )
                assert envoy.destination(head) in (f"127.0.0.1:{port}", f"[::1]:{port}")
                assert envoy.streamed([chunk]) == [(b'{"model": "m"}', True)]
                assert running.count("picked") == 1 and running.count("unavailable") == 1
                late = envoy.headers(
                    "/inference.GRPCInferenceService/ModelInfer",
                    Mode.NONE,
                    content_type="application/grpc",
                    grpc_timeout="1m",
                    x_gateway_model_name="m",
                )
                [answer] = await exchange(channel, late, answers=1)
                assert answer.immediate_response.status.code == 429
            monkeypatch.undo()
            await until(lambda: not picker.ready(time.monotonic()))

    run(main())


def test_health_is_that_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.picker.picker.MAX_AGE", math.inf)

    async def main() -> None:
        picker = EndpointPicker()
        async with serving(picker) as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def status(service: str) -> int:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
                return int(answer.status)

            serves = health_pb2.HealthCheckResponse.SERVING
            assert await status("liveness") == serves
            for service in ("", "readiness", SERVICE):
                assert await status(service) == health_pb2.HealthCheckResponse.NOT_SERVING
            picker.observe("a", VirtualServer({"m": 1.0}).state(0.0), time.monotonic(), time.monotonic())
            for service in ("", "readiness", SERVICE):
                assert await status(service) == serves
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await status("other")
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND

    run(main())


def test_broken_message_ends_the_call_alone() -> None:
    async def main() -> None:
        async with (
            serving(EndpointPicker()) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            call: Any = channel.stream_stream(f"/{SERVICE}/Process")(timeout=PATIENCE)
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            [answer] = await exchange(channel, envoy.headers("/x", Mode.NONE), answers=1)
            assert answer.immediate_response.status.code == 503

    run(main())


def test_served_with_tls() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    context.set_alpn_protocols(["h2"])

    async def main() -> None:
        async with serving(EndpointPicker(), context) as running:
            credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(f"localhost:{running.port}", credentials) as channel:
                [answer] = await exchange(channel, envoy.headers("/x", Mode.NONE), answers=1)
                assert answer.immediate_response.status.code == 503

    run(main())


def test_poller_shows_a_token_over_tls_and_sends_requests_to_another_port() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    state = VirtualServer({"m": 1.0}).state(0.0)

    async def main() -> None:
        picker = EndpointPicker()
        access = Access({Role.OBSERVE: [TOKEN]})
        async with replica(lambda: state, access=access, tls=context) as port:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with polling(picker, port, headers=headers, tls=trusted, destination_port=8001):
                await until(lambda: picker.ready(time.monotonic()))
                decision = picker.pick("m", time.monotonic())
                assert str(decision).count(":8001") == 1

    run(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "GET /cotenant/admission is answered with 404"),
        (
            b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 21\r\n\r\n{"error": "no token"}',
            "GET /cotenant/admission is answered with 401: no token",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "its admission state cannot be read: Object missing"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "it closed the connection"),
        (b"SSH-2.0-x\r\n", "it answers no HTTP"),
        (b"", "it closed the connection"),
    ],
)
def test_poller_says_once_why_a_replica_takes_no_requests(
    answer: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        picker = EndpointPicker()
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server, polling(picker, server.sockets[0].getsockname()[1]):
            await until(lambda: asked >= 3)
        assert not picker.ready(time.monotonic())

    with caplog.at_level(logging.WARNING):
        run(main())
    told = [record.getMessage() for record in caplog.records if "127.0.0.1" in record.getMessage()]
    assert len(told) == 1 and reason in told[0]


def test_poller_finds_a_replica_that_comes_later_and_says_that_a_name_has_no_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = VirtualServer({"m": 1.0}).state(0.0)

    async def main() -> None:
        picker = EndpointPicker()
        async with replica(lambda: state) as port:
            pass
        names = [("localhost", port), ("no-such-name.invalid", 1), ("no..name", 1)]
        task = asyncio.create_task(ReplicaPoller(picker, names, clock=time.monotonic, interval=0.02).run())
        await until(lambda: "takes no requests" in caplog.text)
        core = StubCore()
        server = HttpServer(core, admission=lambda: state)
        await server.listen("127.0.0.1", port)
        await until(lambda: picker.ready(time.monotonic()))
        await server.stop(0.0)
        core.arena.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())
    assert caplog.text.count("no address of no-such-name.invalid") == 1
    assert caplog.text.count("no address of no..name") == 1


def test_bodies_that_are_held_count_as_memory_and_those_beyond_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MEMORY", 3 << 20)
    monkeypatch.setattr("cotenant.k8s.picker.picker.MAX_AGE", math.inf)

    async def main() -> None:
        picker = EndpointPicker()
        picker.observe("a:1", VirtualServer({"m": 1.0}).state(0.0), time.monotonic(), time.monotonic())
        async with (
            serving(picker) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
            calls = [stub.Process(timeout=PATIENCE) for _ in range(3)]
            memory = running.listener._shared.memory
            for call in calls[:2]:
                await call.write(envoy.headers("/v1/completions", Mode.FULL_DUPLEX_STREAMED))
                await call.write(envoy.body(b" " * (1 << 20)))
            await until(lambda: memory.used >= 2 << 20)
            await calls[2].write(envoy.headers("/v1/completions", Mode.FULL_DUPLEX_STREAMED))
            await calls[2].write(envoy.body(b" " * (2 << 20)))
            assert await calls[2].code() is grpc.StatusCode.UNAVAILABLE
            await calls[0].write(envoy.body(b'{"model": "m"}', last=True))
            assert envoy.destination(await calls[0].read()) == "a:1"
            for call in calls[:2]:
                call.cancel()
            await until(lambda: memory.used == 0)

    run(main())


def test_gateway_that_resets_each_call_keeps_its_connection() -> None:
    """As Envoy does, once it needs no more of a call."""
    listener = Running(EndpointPicker()).listener
    misuse = Misuse(listener._shared.rapid_resets)
    for _ in range(100 * MAX_RAPID):
        misuse.count_reset(0.001)
