"""Answers that a Prometheus does not give, or something else in its place."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cotenant.errors import ConfigError, PrometheusError
from cotenant.k8s.scaling.observed import MetricRepository
from cotenant.k8s.scaling.prometheus import MAX_ANSWER, Sample, prometheus

VECTOR = {"resultType": "vector", "result": [{"metric": {"model": "a"}, "value": [1.0, "2.5"]}]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answers(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content, status=status, headers=headers)

    return handle


def ask(handle: Handler, path: str = "/", **options: Any) -> tuple[Sample, ...]:
    """Ask a server that answers so."""

    async def main() -> tuple[Sample, ...]:
        app = web.Application()
        app.router.add_get(f"{path}api/v1/query", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            port = runner.addresses[0][1]
            async with asyncio.timeout(60), prometheus(f"http://127.0.0.1:{port}{path}", **options) as client:
                return await client.query("q")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_answer_below_a_path_is_read() -> None:
    assert ask(answers({"status": "success", "data": VECTOR}), "/prom/") == (Sample({"model": "a"}, 2.5),)


def test_values_that_are_not_finite_are_not_known() -> None:
    series = [{"metric": {"model": text}, "value": [1, text]} for text in ("NaN", "+Inf", "-Inf", "0")]
    data = {"resultType": "vector", "result": series}
    assert ask(answers({"status": "success", "data": data})) == (Sample({"model": "0"}, 0.0),)


def test_note_among_the_warnings_is_no_error() -> None:
    note = 'PromQL info: metric might not be a counter, name does not end in _total/_sum/_count/_bucket: "q"'
    told = {"status": "success", "data": VECTOR}
    assert ask(answers(told | {"warnings": [note]})) == (Sample({"model": "a"}, 2.5),)
    with pytest.raises(PrometheusError, match="knows q only in part: remote store is away"):
        ask(answers(told | {"warnings": [note, "remote store is away"]}))


def test_no_series_is_no_error() -> None:
    assert ask(answers({"status": "success", "data": {"resultType": "vector", "result": []}})) == ()


@pytest.mark.parametrize(
    ("handle", "said", "status"),
    [
        (answers(b"<html>Login</html>"), "answers what is not an answer of its API: ", 200),
        (answers(b"\xff\xfe"), "answers what is not an answer of its API: ", 200),
        (answers(b""), "answers what is not an answer of its API: ", 200),
        (answers(b"no healthy upstream", 503), r"answers \(503\): no healthy upstream", 503),
        (answers(b"", 502), r"answers \(502\): nothing", 502),
        (answers(b"", 302, {"Location": "/login"}), r"answers \(302\): nothing", 302),
        (answers({"status": "maybe"}), "answers what is not an answer of its API: ", 200),
        (answers({"status": "success"}), r"does not answer q \(200\): no reason is given", 200),
        (
            answers({"status": "error", "errorType": "execution", "error": "found duplicate series"}, 422),
            r"does not answer q \(422\): execution: found duplicate series",
            422,
        ),
        (
            answers({"status": "error", "errorType": "unavailable", "error": "starting"}, 503),
            r"\(503\): unavailable: starting",
            503,
        ),
        (
            answers({"status": "success", "data": VECTOR, "warnings": ["remote store is away"]}),
            "knows q only in part: remote store is away",
            200,
        ),
        (
            answers({"status": "success", "data": {"resultType": "scalar", "result": [1.0, "2"]}}),
            "q is a scalar and no instant vector",
            200,
        ),
        (
            answers({"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}}),
            "answers what is not an answer of its API: .*value",
            200,
        ),
        (
            answers(
                {
                    "status": "success",
                    "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "much"]}]},
                }
            ),
            "answers what is not an answer of its API: .*much",
            200,
        ),
        (answers(b" " * (MAX_ANSWER + 1)), "answers with more than 16 MiB; ask for fewer series", 200),
        (
            answers(gzip.compress(b" " * (MAX_ANSWER + 1)), headers={"Content-Encoding": "gzip"}),
            "answers with more than 16 MiB",
            200,
        ),
        (answers(b"nonsense", headers={"Content-Encoding": "gzip"}), "does not answer: ", 0),
    ],
)
def test_bad_answer_is_an_error_that_says_what_it_is(handle: Handler, said: str, status: int) -> None:
    with pytest.raises(PrometheusError, match=said) as failed:
        ask(handle)
    assert failed.value.status == status and str(failed.value).startswith(("http://127.0.0.1:", "q is"))


def test_answer_that_does_not_come_is_given_up() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    with pytest.raises(PrometheusError, match=r"takes more than 0\.1 s to answer") as failed:
        ask(silent, timeout=0.1)
    assert failed.value.status == 0


def test_answer_that_trickles_is_given_up() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    with pytest.raises(PrometheusError, match=r"takes more than 0\.3 s to answer"):
        ask(trickle, timeout=0.3)


def test_head_that_trickles_is_given_up() -> None:
    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        try:
            while not writer.transport.is_closing():
                writer.write(b"X-More: 1\r\n")
                await asyncio.sleep(0.02)
        finally:
            writer.close()

    async def main() -> None:
        async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server, asyncio.timeout(60):
            port = server.sockets[0].getsockname()[1]
            async with prometheus(f"http://127.0.0.1:{port}", timeout=0.3) as client:
                with pytest.raises(PrometheusError, match=r"takes more than 0\.3 s to answer"):
                    await client.query("q")

    asyncio.run(main())


def test_nobody_there_is_said_and_a_password_is_not() -> None:
    async def main() -> None:
        async with prometheus("http://me:secret@127.0.0.1:1") as client:
            with pytest.raises(PrometheusError, match=r"^http://127\.0\.0\.1:1 does not answer: ") as failed:
                await MetricRepository(client).read()
            assert failed.value.status == 0 and "secret" not in str(failed.value)

    asyncio.run(main())


def test_token_is_read_for_each_request(tmp_path: Path) -> None:
    seen = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        return web.json_response({"status": "success", "data": VECTOR})

    file = tmp_path / "token"
    file.write_text("first\n")
    ask(handle, token_file=file)
    file.write_text("second\n")
    ask(handle, token_file=file)
    assert seen == ["Bearer first", "Bearer second"]
    for wrong in (b"two words", "schlüssel".encode(), b"\xff"):
        file.write_bytes(wrong)
        with pytest.raises(PrometheusError, match="token: line 1 is not a token"):
            ask(handle, token_file=file)
    with pytest.raises(PrometheusError, match=r"^cannot authenticate: [^ ]*none: No such file or directory;"):
        ask(handle, token_file=tmp_path / "none")


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "ftp://p:9090", "http://", "http://p:port", "http://p/?query=up", "http://p:9090/#graph"]
)
def test_url_that_is_none_is_refused(url: str) -> None:
    async def main() -> None:
        async with prometheus(url):
            raise AssertionError

    with pytest.raises(ConfigError, match="is not a Prometheus server; write its URL, such as http://prometheus:9090"):
        asyncio.run(main())


@pytest.mark.parametrize("password", ["se/cret", "se#cret", "se?cret", "se@cret#"])
def test_url_that_is_refused_does_not_show_its_password(password: str) -> None:
    async def main() -> None:
        async with prometheus(f"http://me:{password}@p:9090"):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"^the URL is not a Prometheus server; ") as failed:
        asyncio.run(main())
    assert "cret" not in str(failed.value)


def test_user_and_token_are_refused_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with prometheus("http://me:secret@127.0.0.1:9090", token_file=tmp_path / "token"):
            raise AssertionError

    with pytest.raises(
        ConfigError, match=r"^http://127\.0\.0\.1:9090: authenticates by a user in its URL or by a token"
    ):
        asyncio.run(main())


def test_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    async def main(file: Path) -> None:
        async with prometheus("https://p:9090", ca_file=file):
            raise AssertionError

    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("ca.pem", "none.pem"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be used as a certificate"):
            asyncio.run(main(tmp_path / name))
