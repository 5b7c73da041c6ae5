"""A node says why TLS with a front end failed, and what to do: real handshakes, on both event loops."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from cotenant.backends.fake import Fake
from cotenant.live.nodes.tls_failures import MAX_REASONS, REPEAT, TlsFailures
from tests.live.nodes.agents import agent_of, nodes_of, tls_context, up
from tests.live.workers import PATIENCE

LOGGER = "cotenant.live.nodes.tls_failures"
AUTHORITY, OTHER = trustme.CA(), trustme.CA()


def context(purpose: ssl.Purpose, by: trustme.CA | None, trusts: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    return tls_context(purpose, by, trusts)


def no_tls_12() -> ssl.SSLContext:
    made = context(ssl.Purpose.CLIENT_AUTH, AUTHORITY)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    return made


def only_tls_12() -> ssl.SSLContext:
    made = context(ssl.Purpose.SERVER_AUTH, AUTHORITY)
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (lambda: context(ssl.Purpose.SERVER_AUTH, None), "it shows no certificate; set cluster.certificate, key and"),
        (
            lambda: context(ssl.Purpose.SERVER_AUTH, OTHER),
            "its certificate is not valid, or not one that this node's cluster.authority has signed: ",
        ),
        (
            lambda: context(ssl.Purpose.SERVER_AUTH, AUTHORITY, OTHER),
            "it left before TLS was set up: it checked the port, or it does not accept this node's certificate",
        ),
        (lambda: None, "it does not use TLS; give certificates (cluster.certificate, key and authority) to both ends"),
        (only_tls_12, "UNSUPPORTED_PROTOCOL; both ends need TLS 1.2 or later"),
    ],
)
def test_failed_handshake_is_logged_once_with_the_way_out(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Any], None],
    theirs: Callable[[], ssl.SSLContext | None],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path, tls=no_tls_12()) as agent:
            failures = agent.agent._tls_failures
            failed: list[tuple[str, OSError]] = []
            add = failures.add

            def count(host: str, error: OSError) -> None:
                failed.append((host, error))
                add(host, error)

            monkeypatch.setattr(failures, "add", count)
            async with nodes_of(agent.address, tls=theirs()), asyncio.timeout(PATIENCE):
                while len(failed) < 3:  # it dials on
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(PATIENCE):
                while agent.agent._sessions:  # without a wait for the handshake of what has failed
                    await asyncio.sleep(0.01)
            (line,) = logged(caplog)
            assert line.startswith(f"TLS with 127.0.0.1 failed: {reason}")
            async with nodes_of(agent.address, tls=context(ssl.Purpose.SERVER_AUTH, AUTHORITY)) as nodes:
                await up(nodes)

    run(scenario())


def test_alert_of_a_peer_that_does_not_accept_the_certificate_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def dial(port: int) -> None:
        theirs = context(ssl.Purpose.SERVER_AUTH, AUTHORITY, OTHER)
        with socket.create_connection(("127.0.0.1", port)) as plain, pytest.raises(ssl.SSLCertVerificationError):
            theirs.wrap_socket(plain, server_hostname="127.0.0.1")

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path, tls=no_tls_12()) as agent:
            await asyncio.to_thread(dial, agent.port)
            async with asyncio.timeout(PATIENCE):
                while not logged(caplog):
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert logged(caplog) == [
        "TLS with 127.0.0.1 failed: it does not accept this node's certificate (TLSV1_ALERT_UNKNOWN_CA); "
        "cluster.authority there has to be the one that signed cluster.certificate here, for the address that it dials"
    ]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_peer_that_sets_up_no_tls_is_cut_off_when_the_handshake_has_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], None]
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr("cotenant.live.nodes.agent.HANDSHAKE", 0.1)

    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path, tls=no_tls_12()) as agent, asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
            assert await reader.read() == b""
            writer.close()
            while agent.agent._sessions:
                await asyncio.sleep(0.01)

    run(scenario())
    assert logged(caplog) == [
        "TLS with 127.0.0.1 failed: it did not set up TLS in time: it is stuck, or it is no front end"
    ]


def failure(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "it failed")
    error.reason = reason
    return error


def test_reasons_are_logged_again_later_and_a_flood_of_peers_is_not(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = TlsFailures(clock=lambda: now)
    failures.add("10.0.0.1", failure("A"))
    failures.add("10.0.0.1", failure("A"))
    failures.add("10.0.0.1", failure("B"))
    failures.add("10.0.0.2", failure("A"))
    assert len(logged(caplog)) == 3
    now = REPEAT
    failures.add("10.0.0.1", failure("A"))
    assert len(logged(caplog)) == 4
    for number in range(2 * MAX_REASONS):
        failures.add(f"10.1.0.{number}", failure("A"))
    assert len(logged(caplog)) == 3 + MAX_REASONS
