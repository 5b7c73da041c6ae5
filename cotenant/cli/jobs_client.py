"""Ask a running server about best-effort jobs, and submit them as the user that it runs as."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from cotenant.cli.client import ServerEndpoint, error_message, send
from cotenant.core.identity import decode_identity
from cotenant.core.job import JobId, JobRequest, JobStatus, reaches_files
from cotenant.errors import ConfigError, FailedError
from cotenant.live.access import is_local
from cotenant.live.job_proof import HEADER, JobKey
from cotenant.live.job_service import JobList, JobOutput, KeyFile

T = TypeVar("T")

JOBS = "/cotenant/jobs"
TIMEOUT = 60.0  # seconds: a job is stored before its submission is answered


def fetch_jobs(server: ServerEndpoint) -> JobList:
    """Return all jobs. Raises FailedError with the server's message, ConfigError where none answers."""
    return _asked(server, "GET", JOBS, JobList)


def fetch_job(server: ServerEndpoint, id: JobId) -> JobStatus:
    """Return where a job stands. Raises FailedError with the server's message."""
    return _asked(server, "GET", _path(id), JobStatus)


def fetch_output(server: ServerEndpoint, id: JobId, start: int) -> JobOutput:
    """Return what a job wrote from a byte on. Raises FailedError with the server's message."""
    return _asked(server, "GET", f"{_path(id)}/output?from={start}", JobOutput)


def control_job(server: ServerEndpoint, id: JobId, verb: str) -> JobStatus:
    """Pause, resume or cancel a job, and return where it stands. Raises FailedError with the server's message."""
    if verb == "cancel":
        return _asked(server, "DELETE", _path(id), JobStatus)
    return _asked(server, "POST", f"{_path(id)}/{verb}", JobStatus)


def submit_job(server: ServerEndpoint, request: JobRequest) -> JobStatus:
    """Submit a job, and return where it stands. Raises FailedError with the server's message, ConfigError where this
    user cannot prove to be the server's."""
    body = msgspec.json.encode(request)
    headers = {"Content-Type": "application/json"}
    if reaches_files(request.work):
        headers |= _proof(server, body)
    return _asked(server, "POST", JOBS, JobStatus, body, headers)


def _proof(server: ServerEndpoint, body: bytes) -> dict[str, str]:
    """Return the header that proves who submits a request; none where the server asks for none."""
    named = _asked(server, "GET", f"{JOBS}-key", KeyFile).file
    if not named:
        return {}
    if not is_local(server.address):
        raise ConfigError(
            f"{server.address!r}: a job that runs a command or a file, or that names files, is submitted on the"
            ' machine of the server, by the user that it runs as; or let its settings say [jobs] commands = "tokens"'
        )
    try:
        key = JobKey.read(Path(named))
    except OSError as error:
        raise ConfigError(
            f"{named}: {error.strerror}: a job that runs a command or a file, or that names files, is submitted by the"
            " user that the server runs as"
        ) from None
    return {HEADER: key.prove(JOBS, body, datetime.now(UTC).timestamp())}


def _path(id: JobId) -> str:
    return f"{JOBS}/{quote(id, safe='')}"


def _asked(
    server: ServerEndpoint,
    method: str,
    path: str,
    type_: type[T],
    body: bytes = b"",
    headers: dict[str, Any] | None = None,
) -> T:
    response = send(server, method, path, body, headers, TIMEOUT)
    if response.status in (404, 405) and error_message(response) in ("Not Found", "Method Not Allowed"):
        raise ConfigError(f"{server} knows no jobs; is it a server of this version?")
    if response.status == 401:
        raise FailedError(f"{error_message(response)}; give one with --token-file")
    if response.status != 200:
        raise FailedError(error_message(response))
    try:
        return msgspec.json.decode(response.body, type=type_, dec_hook=decode_identity)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{server}{path} answers something else: {error}; is it a server of this version?") from None
