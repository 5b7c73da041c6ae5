"""Prove that a caller is the user that the server runs as, without a word that others could use.

What a job runs, and the files that it names, are read and run as the server's user. So whoever submits such a job shows
that they can read that user's key: a file of mode 0600. The key is not sent. Each request has a code of its own
(HMAC-SHA256) over its time, a random number, the path and the body, so that a program which only pretends to be the
server learns nothing from it that would run anything else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from cotenant.errors import ConfigError, ForbiddenError

HEADER = "Cotenant-Proof"
LIFETIME = 60.0  # seconds that clocks may differ, and a proof may be on its way
MOST_PROOFS = 4096  # that are remembered, so that none is used twice
_KEY = re.compile(r"cotenant-jobs-([0-9a-f]{64})\n?")
_PROOF = re.compile(r"([0-9]{1,16}):([0-9a-f]{32}):([0-9a-f]{64})")


class JobKey:
    """Hold the key of a server's user. path: where it is."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self._secret = secret
        self._used: dict[str, float] = {}  # random numbers, by when they are forgotten

    @classmethod
    def of_file(cls, path: Path) -> JobKey:
        """Read a key, or make one where there is none. Raises ConfigError, OSError."""
        if path.exists():
            return cls.read(path)
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"cotenant-jobs-{secrets.token_hex(32)}\n")
            new.replace(path)  # whole or not at all: a disk that is full leaves no empty key
        except OSError:
            new.unlink(missing_ok=True)
            raise
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> JobKey:
        """Read a key. Raises ConfigError for a file that is none, or that others may read or write; OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe keeps nobody waiting
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{path}: is not a file, and so no key for jobs")
            text = file.read(256).decode("ascii", "replace")
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise ConfigError(f"{path}: is not this user's alone; remove it, and the server makes another")
        match = _KEY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{path}: is not a key for jobs; remove it, and the server makes another")
        return cls(path, bytes.fromhex(match[1]))

    def prove(self, path: str, body: bytes, now: float) -> str:
        """Return the header for a request. now: unix seconds."""
        number = secrets.token_hex(16)
        return f"{int(now)}:{number}:{self._code(int(now), number, path, body)}"

    def check(self, proof: str, path: str, body: bytes, now: float, since: float = 0.0) -> None:
        """Raise ForbiddenError where a header does not prove that this request is the user's. now: unix seconds. since:
        when the server started: which proofs were used before, it does not know."""
        match = _PROOF.fullmatch(proof)
        if match is None:
            raise ForbiddenError(
                "a job that runs a command or a file, or that names files, is for the user that the server runs as;"
                " submit it with `cotenant jobs submit` as that user, on the server's machine"
            )
        time, number = int(match[1]), match[2]
        if not hmac.compare_digest(match[3], self._code(time, number, path, body)):
            raise ForbiddenError("the proof is not by this server's key; submit the job as the user that it runs as")
        if abs(time - now) > LIFETIME or time < int(since) or number in self._used:
            raise ForbiddenError("the proof has expired; submit the job again")
        self._used = {used: until for used, until in self._used.items() if until > now}
        if len(self._used) >= MOST_PROOFS:
            raise ForbiddenError("too many jobs are being submitted; try again in a minute")
        self._used[number] = time + 2 * LIFETIME

    def _code(self, time: int, number: str, path: str, body: bytes) -> str:
        digest = hashlib.sha256(body).hexdigest()
        return hmac.new(self._secret, f"{time}\0{number}\0{path}\0{digest}".encode(), hashlib.sha256).hexdigest()
