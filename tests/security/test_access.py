"""Who may do what: every route, method and protocol for every role, from here, from elsewhere and from web pages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cotenant.app.access import read_tokens
from cotenant.errors import ConfigError, ForbiddenError, UnauthenticatedError
from cotenant.live.access import GRANTS, Access, Caller, Permission, Role, is_local
from cotenant.live.grpc import GrpcServer
from cotenant.live.grpc.access import METHODS, permission_of
from cotenant.live.grpc.health import INFERENCE_SERVICE
from cotenant.live.http import HttpServer
from cotenant.live.http.routes import ROUTES
from cotenant.protocol import messages
from tests.live.stub import StubCore
from tests.live.test_http import Wire, answers

TOKENS = {Role.INFER: ["infer-0123456789"], Role.OBSERVE: ["observe-01234567"], Role.CONTROL: ["control-01234567"]}
CALLERS = [None, "unknown-01234567", *(tokens[0] for tokens in TOKENS.values())]
ROLES = {tokens[0]: role for role, tokens in TOKENS.items()}

# What each route needs, said once more by hand: a route that is new, or needs something else, has to be added here.
HTTP = {
    "GET /": "public",
    "GET /cotenant/page/page.js": "public",
    "GET /cotenant/events": "observe",
    "GET /cotenant/status": "observe",
    "GET /cotenant/admission": "observe",
    "POST /cotenant/reload": "control",
    "GET /cotenant/jobs": "observe",
    "POST /cotenant/jobs": "control",
    "GET /cotenant/jobs-key": "control",
    "GET /cotenant/jobs/job-1": "observe",
    "DELETE /cotenant/jobs/job-1": "control",
    "POST /cotenant/jobs/job-1/pause": "control",
    "POST /cotenant/jobs/job-1/resume": "control",
    "GET /cotenant/jobs/job-1/output": "control",
    "GET /metrics": "observe",
    "GET /openapi.json": "metadata",
    "GET /v2": "metadata",
    "GET /v2/health/live": "public",
    "GET /v2/health/ready": "public",
    "GET /v2/models": "metadata",
    "GET /v2/models/stats": "observe",
    "GET /v2/models/m": "metadata",
    "GET /v2/models/m/ready": "metadata",
    "GET /v2/models/m/config": "metadata",
    "GET /v2/models/m/stats": "observe",
    "POST /v2/models/m/infer": "infer",
    "POST /v2/models/m/generate": "infer",
    "POST /v2/models/m/generate_stream": "infer",
    "GET /v2/trace/setting": "observe",
    "POST /v2/trace/setting": "control",
    "GET /v2/models/m/trace/setting": "observe",
    "POST /v2/models/m/trace/setting": "control",
    "GET /v2/logging": "observe",
    "POST /v2/logging": "control",
    "POST /v2/repository/index": "metadata",
    "POST /v2/repository/models/m/load": "control",
    "POST /v2/repository/models/m/unload": "control",
    "POST /v2/repository/other/index": "control",
    "POST /v2/repository/other/models/m/load": "control",
    "POST /v2/repository/other/models/m/unload": "control",
    "GET /v2/systemsharedmemory/status": "metadata",
    "POST /v2/systemsharedmemory/register": "share",
    "POST /v2/systemsharedmemory/unregister": "share",
    "GET /v2/cudasharedmemory/status": "metadata",
    "POST /v2/cudasharedmemory/register": "infer",
    "POST /v2/cudasharedmemory/unregister": "infer",
}
GRPC = {
    "ServerLive": "public",
    "ServerReady": "public",
    "ServerMetadata": "metadata",
    "ModelReady": "metadata",
    "ModelMetadata": "metadata",
    "ModelConfig": "metadata",
    "RepositoryIndex": "metadata",
    "SystemSharedMemoryStatus": "metadata",
    "CudaSharedMemoryStatus": "metadata",
    "ModelInfer": "infer",
    "ModelStreamInfer": "infer",
    "SystemSharedMemoryRegister": "share",
    "SystemSharedMemoryUnregister": "share",
    "CudaSharedMemoryRegister": "infer",
    "CudaSharedMemoryUnregister": "infer",
    "ModelStatistics": "observe",
    "TraceSetting": "observe",
    "LogSettings": "observe",
    "RepositoryModelLoad": "control",
    "RepositoryModelUnload": "control",
}


def path_of(template: str) -> str:
    """Return the simplest path of a route."""
    names = {"model": "m", "file": "page.js", "repository": "other", "job": "job-1"}
    return re.sub(r"\{(\w+)\}", lambda found: names[found[1]], re.sub(r"\[.*?\]", "", template))


HTTP_ROUTES = [
    (f"{method.decode()} {path_of(pattern)}", endpoint.permission)
    for pattern, endpoints in ROUTES
    for method, endpoint in endpoints.items()
]


def may(token: str | None, permission: str) -> int | None:
    """Return the status with which a caller is rejected, None where it is not."""
    if permission == "public":
        return None
    role = ROLES.get(token or "")
    if role is None:
        return 401
    return None if Permission(permission) in GRANTS[role] else 403


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


def test_every_route_says_what_it_needs() -> None:
    assert {route: permission.value for route, permission in HTTP_ROUTES} == HTTP
    assert len(HTTP_ROUTES) == len(HTTP)


def test_every_method_of_grpc_says_what_it_needs() -> None:
    offered = {method.name for method in messages.pool.FindServiceByName(INFERENCE_SERVICE).methods}
    needed = {name: permission_of(name, empty(name)).value for name in METHODS}
    assert needed == GRPC and needed.keys() == offered
    for name in ("TraceSetting", "LogSettings"):
        message = empty(name)
        message.settings["x"].SetInParent()
        assert permission_of(name, message) is Permission.CONTROL


def empty(method: str) -> Any:
    return getattr(messages, f"{method.replace('Stream', '')}Request")()


@pytest.mark.parametrize("token", CALLERS)
@pytest.mark.parametrize("route", HTTP)
def test_http_route_answers_whom_it_is_for(route: str, token: str | None, core: StubCore) -> None:
    async def main() -> None:
        wire = Wire(HttpServer(core, access=Access(TOKENS)))
        credentials = "" if token is None else f"Authorization: Bearer {token}\r\n"
        wire.say(f"{route} HTTP/1.1\r\nHost: elsewhere\r\n{credentials}Content-Length: 2\r\n\r\n{{}}".encode())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        expected = may(token, HTTP[route]) or (403 if HTTP[route] == "share" else None)  # it comes from nowhere
        if expected is not None or wire.got:  # metrics are made in a thread
            (answer,) = answers(wire.got)
            assert (answer.status in (401, 403)) == (expected is not None)
            assert expected is None or answer.status == expected
        if token is not None:
            assert token.encode() not in wire.got
        wire.protocol.connection_lost(None)

    asyncio.run(main())


def test_grpc_method_answers_whom_it_is_for(core: StubCore) -> None:
    def ask(address: str) -> None:
        channel: Any
        with grpc.insecure_channel(address) as channel:
            for method, permission in GRPC.items():
                for token in CALLERS:
                    expected = {None: None, 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[may(token, permission)]
                    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
                    path = f"/{INFERENCE_SERVICE}/{method}"
                    code, text = "", ""
                    try:
                        if method == "ModelStreamInfer":
                            list(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=20))
                        else:
                            channel.unary_unary(path)(b"", metadata=metadata, timeout=20)
                    except grpc.RpcError as error:
                        code, text = error.code().name, str(error.details())
                    refused = code if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") else None
                    assert refused == expected, (method, token)
                    assert token is None or token not in text

    async def main() -> None:
        server = GrpcServer(core, access=Access(TOKENS))
        port = await server.listen("127.0.0.1", 0)
        try:
            await asyncio.to_thread(ask, f"127.0.0.1:{port}")
        finally:
            await server.stop(0.0)

    asyncio.run(main())


HERE = {"peer": "127.0.0.1", "host": "localhost:8000"}
OPERATORS: dict[str, dict[str, Any]] = {
    "by name": HERE,
    "by address": {"peer": "127.0.0.1", "host": "127.0.0.1:8000"},
    "over IPv6": {"peer": "::1", "host": "[::1]:8000"},
    "mapped": {"peer": "::ffff:127.0.0.1", "host": "LOCALHOST"},
    "own page": {**HERE, "origin": "http://localhost:8000"},
    "gRPC": {"peer": "::1"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "another machine": {"peer": "192.0.2.1", "host": "localhost"},
    "another machine over gRPC": {"peer": "2001:db8::1"},
    "no address": {"peer": "", "host": "localhost"},
    "rebinding": {"peer": "127.0.0.1", "host": "evil.example:8000"},
    "rebinding of a name that looks local": {"peer": "127.0.0.1", "host": "127.0.0.1.evil.example"},
    "rebinding with a port that is none": {"peer": "127.0.0.1", "host": "localhost:80.evil.example"},
    "no host": {"peer": "127.0.0.1", "host": ""},
    "page of another site": {**HERE, "origin": "https://evil.example"},
    "page of another port": {**HERE, "origin": "http://localhost:3000"},
    "file or sandbox": {**HERE, "origin": "null"},
    "page over gRPC": {"peer": "127.0.0.1", "origin": "https://evil.example"},
    "proxy": {**HERE, "proxied": True},
}


@pytest.mark.parametrize("caller", OPERATORS.values(), ids=OPERATORS)
def test_program_of_this_machine_controls(caller: dict[str, Any]) -> None:
    Access().check(Permission.CONTROL, Caller(**caller))


@pytest.mark.parametrize("caller", OTHERS.values(), ids=OTHERS)
def test_anybody_else_does_not_control(caller: dict[str, Any]) -> None:
    with pytest.raises(ForbiddenError):
        Access().check(Permission.CONTROL, Caller(**caller))
    Access().check(Permission.INFER, Caller(**caller))
    Access(control="any").check(Permission.CONTROL, Caller(**caller))
    with pytest.raises(UnauthenticatedError):
        Access(TOKENS, control="any").check(Permission.CONTROL, Caller(**caller))
    Access(TOKENS).check(Permission.CONTROL, Caller(**caller, authorization=f"bearer {TOKENS[Role.CONTROL][0]}"))


CONTROL = [route for route, permission in HTTP_ROUTES if permission is Permission.CONTROL]
FORGERIES = {
    "CSRF": "Host: localhost\r\nOrigin: https://evil.example\r\n",
    "rebinding": "Host: evil.example\r\n",
    "both": "Host: evil.example\r\nOrigin: http://evil.example\r\n",
    "proxy": "Host: localhost\r\nX-Forwarded-For: 192.0.2.1\r\n",
}


@pytest.mark.parametrize("head", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("route", CONTROL)
def test_web_page_controls_nothing(route: str, head: str, core: StubCore) -> None:
    async def main() -> None:
        reloaded: list[int] = []

        async def reload() -> None:
            reloaded.append(1)

        wire = Wire(HttpServer(core, reload=reload))
        wire.say(f"{route} HTTP/1.1\r\n{head}Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await asyncio.sleep(0)
        (answer,) = answers(wire.got)
        assert answer.status == 403 and not reloaded
        wire.protocol.connection_lost(None)

    asyncio.run(main())


def test_body_of_a_caller_without_token_is_not_read(core: StubCore) -> None:
    wire = Wire(HttpServer(core, access=Access(TOKENS)))
    wire.say(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
    (answer,) = answers(wire.got)
    assert answer.status == 401 and wire.protocol._held == 0
    wire.protocol.connection_lost(None)


def test_token_of_a_caller_is_none_of_another_length_or_scheme() -> None:
    token = TOKENS[Role.INFER][0]
    for authorization in (
        "",
        token,
        f"Basic {token}",
        "Bearer",
        f"Bearer {token[:-1]}",
        f"Bearer {token}x",
        "Bearer \x80",
    ):
        with pytest.raises(UnauthenticatedError) as raised:
            Access(TOKENS).check(Permission.INFER, Caller(peer="", authorization=authorization))
        assert token[:8] not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no token; write one"),
        ("# only this\n", "no token; write one"),
        ("short\n", "line 1 is not a token"),
        ("0123456789abcdef\nquite another secret\n", "line 2 is not a token"),
        ("päßwörter-sind-keine", "line 1 is not a token"),
    ],
)
def test_file_without_good_tokens_is_an_error_that_repeats_none(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as raised:
        read_tokens(path)
    assert not any(word in str(raised.value) for word in text.split() if len(word) > 4)


def test_address_is_local_by_any_spelling() -> None:
    for address in ("localhost:1", "http://127.0.0.1:8000", "https://[::1]:8000", "127.9.9.9"):
        assert is_local(address)
    for address in ("example.org", "http://10.0.0.1:8000", "https://localhost.evil.example"):
        assert not is_local(address)


@pytest.mark.parametrize("access", [Access(), Access(control="any"), Access(TOKENS)], ids=["default", "any", "tokens"])
def test_memory_of_this_machine_is_shared_with_programs_of_it_alone(access: Access) -> None:
    token = f"bearer {TOKENS[Role.INFER][0]}"
    here: dict[str, Any] = {**HERE}
    access.check(Permission.SHARE, Caller(**here, authorization=token))
    elsewhere: dict[str, Any]
    for elsewhere in ({"peer": "10.0.0.7"}, {**HERE, "proxied": True}, {**HERE, "origin": "http://evil.example"}):
        with pytest.raises(ForbiddenError, match=r"share memory with it|another site"):
            access.check(Permission.SHARE, Caller(**elsewhere, authorization=token))
