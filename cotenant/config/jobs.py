"""Read files that describe best-effort jobs, and the settings of a server for them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from cotenant.config.toml import check_one_of, decode_toml, read_text
from cotenant.core import units
from cotenant.core.job import BatchInference, Command, JobRequest, Training, Work
from cotenant.errors import ConfigError

CommandPolicy = Literal["user", "tokens", "off"]


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure best-effort jobs.

    enabled: whether the server takes any. folder: where they are stored, with their output and checkpoints; None:
    beside the state of the server. commands: who may submit jobs that run code or name files: the user that the server
    runs as, or whoever has a token for control, too, or nobody. memory: bytes that a job has that names no limit.
    """

    enabled: bool = True
    folder: Path | None = None
    commands: CommandPolicy = "user"
    memory: int = 2 << 30


class JobsEntry(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool = True
    folder: str | None = None
    commands: str = "user"
    memory: str = "2GiB"


def read_job_settings(entry: JobsEntry, place: str, base: Path, *, has_tokens: bool) -> JobSettings:
    """Check the settings of jobs. base: what a folder is relative to. Raises ConfigError."""
    commands = check_one_of(entry.commands, CommandPolicy, f"{place}.commands")
    if commands == "tokens" and not has_tokens:
        raise ConfigError(f'{place}.commands: "tokens" needs a file of tokens for control; name it in [tokens]')
    memory = units.parse_memory(entry.memory, f"{place}.memory")
    if memory < 1 << 20:
        raise ConfigError(f"{place}.memory: {entry.memory!r} is less than any process needs; write 256MiB or more")
    return JobSettings(
        enabled=entry.enabled,
        folder=None if entry.folder is None else base / entry.folder,
        commands=commands,
        memory=memory,
    )


class _JobFile(msgspec.Struct, forbid_unknown_fields=True):
    """A job as people write it. Exactly one of training, inference and command stands there."""

    training: Training | None = None
    inference: BatchInference | None = None
    command: Command | None = None
    name: str = ""
    priority: int = 1
    memory: str | None = None
    deadline: str | None = None
    retries: int = 3
    grace: str | int | float = "10s"
    threads: int | None = None


def read_job(path: Path, now: datetime) -> JobRequest:
    """Read a job from a TOML file. Paths are relative to it. now: with its time zone, for the deadline. Raises
    ConfigError, which names the file and the key."""
    try:
        file = decode_toml(read_text(path), _JobFile, path)
        works = [work for work in (file.training, file.inference, file.command) if work is not None]
        if len(works) != 1:
            raise ConfigError("write one table of [training], [inference] and [command], which says what the job does")
        request = JobRequest(
            work=at_place(works[0], path.absolute().parent),
            name=file.name,
            priority=file.priority,
            memory=None if file.memory is None else units.parse_memory(file.memory, "memory"),
            deadline=None if file.deadline is None else parse_deadline(file.deadline, "deadline", now),
            retries=file.retries,
            grace=units.parse_seconds(str(file.grace), "grace"),
            threads=file.threads,
        )
        request.job(1)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(str(path)) else f"{path}: {message}") from None
    return request


def at_place(work: Work, base: Path) -> Work:
    """Return work whose paths are absolute, relative ones being relative to a folder. A command that names no directory
    runs there."""
    match work:
        case Training() if work.file is not None:
            file, function = work.file
            return msgspec.structs.replace(work, source=f"{base / file}:{function}")
        case BatchInference(input=input, output=output):
            return msgspec.structs.replace(work, input=str(base / input), output=str(base / output))
        case Command(directory=directory):
            return msgspec.structs.replace(work, directory=str(base / (directory or "")))
    return work


def parse_deadline(text: str, place: str, now: datetime) -> float:
    """Return unix seconds of a time: ``06:00`` is the next one, ``2h`` from now, ``2026-12-01T06:00`` that day. Without
    a zone it is in that of `now`. Raises ConfigError, also for what has passed."""
    time = _time_of(text.strip(), now)
    if time is None:
        raise ConfigError(f'{place}: {text!r} is not a time; write "06:00", "2h" or "2026-12-01T06:00"')
    if time <= now:
        raise ConfigError(f"{place}: {text!r} has passed; write a future time")
    return time.timestamp()


def _time_of(text: str, now: datetime) -> datetime | None:
    try:
        ahead = units.parse_seconds(text, "")
    except ConfigError:
        ahead = math.nan
    try:
        if not math.isnan(ahead):
            return now + timedelta(seconds=ahead)
        if "-" in text:
            moment = datetime.fromisoformat(text)
            return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)
        clock = datetime.strptime(text, "%H:%M" if text.count(":") == 1 else "%H:%M:%S")
    except (ValueError, OverflowError):
        return None
    today = now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
    return today if today > now else today + timedelta(days=1)
