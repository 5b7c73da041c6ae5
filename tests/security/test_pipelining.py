"""A crowd that pipelines: thousands of requests on each connection, whose responses nobody reads for a while."""

from __future__ import annotations

import json
import re
import socket
import threading
import time

from tests.security.server import ORDINARY, PATIENCE, Served, post

CALLERS, REQUESTS = 8, 1500
HELD_UP = 5.0  # seconds that another caller never waits for an answer


def flood() -> bytes:
    """Return requests for inference, with their numbers as ids, and every tenth a bad one."""
    bodies = [
        json.dumps({"id": str(number), "inputs": [ORDINARY["identity"]]} if number % 10 else {"id": 7}).encode()
        for number in range(REQUESTS)
    ]
    return b"".join([post("/v2/models/identity/infer", body) for body in bodies])


def read_all(sock: socket.socket) -> bytes:
    """Read until the other end is closed."""
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_pipelined_requests_are_answered_in_order_and_hold_nobody_up(server: Served) -> None:
    assert server.serves()
    data = flood()
    last = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    sockets = [server.connect() for _ in range(CALLERS)]
    senders = [threading.Thread(target=sock.sendall, args=(data + last,)) for sock in sockets]
    for sender in senders:
        sender.start()
    longest, others = 0.0, []
    for _ in range(20):  # while nobody reads the responses
        begun = time.monotonic()
        others.append(server.infer("identity", ORDINARY["identity"])[0])
        longest = max(longest, time.monotonic() - begun)
        time.sleep(0.05)
    # On a machine that has more to do some are rejected for overload.
    assert longest < HELD_UP and set(others) <= {200, 503} and 200 in others
    answers: dict[int, bytes] = {}
    readers = [
        threading.Thread(target=lambda number=number, sock=sock: answers.update({number: read_all(sock)}))
        for number, sock in enumerate(sockets)
    ]
    for reader in readers:
        reader.start()
    for thread in (*senders, *readers):
        thread.join(PATIENCE)
        assert not thread.is_alive(), "requests without an answer"
    for sock in sockets:
        sock.close()
    wanted = [b"%d" % number if number % 10 else b"" for number in range(REQUESTS)]
    for said in answers.values():
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", said)
        assert len(statuses) == REQUESTS + 1 and set(statuses) <= {b"200", b"500", b"503"}, "as many as were asked"
        bodies = [part.partition(b"\r\n\r\n")[2] for part in said.split(b"HTTP/1.1 ")[1:]]
        ids = [body.partition(b'"id":"')[2].partition(b'"')[0] for body in bodies[:-1]]
        # What was rejected under overload names no id.
        assert all(got in (want, b"") for got, want in zip(ids, wanted, strict=True))
        assert sum(map(bool, ids)) > 0
    assert len(answers) == CALLERS and server.serves()
