"""Submit, list, follow and control the best-effort jobs of a running server: `cotenant jobs`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape

from cotenant.cli.options import LOCAL, CaFile, Json, ServerAddress, TokenFile, parse_duration
from cotenant.cli.output import aside, console, show_json
from cotenant.core.job import BatchInference, Command, JobRequest, JobState, JobStatus, Training, Work
from cotenant.errors import ConfigError, FailedError

if TYPE_CHECKING:
    from cotenant.cli.client import ServerEndpoint

app = typer.Typer(
    help="Submit, list, follow, pause, resume and cancel the best-effort jobs of a running server.",
    no_args_is_help=True,
)

PERIOD = 0.5  # seconds between two looks at a job that is followed

JobName = Annotated[str, typer.Argument(metavar="JOB", help="ID of the job, such as digits-7.")]


@app.command()
def submit(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Command to run, with its arguments.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Job file (TOML).")] = None,
    train: Annotated[
        str | None,
        typer.Option(
            "--train", metavar="SOURCE", help="Training to run: one of the zoo, such as digits, or FILE.py:FUNCTION."
        ),
    ] = None,
    infer: Annotated[
        str | None, typer.Option("--infer", metavar="MODEL", help="Model to run over the file of --input.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="File of inputs for --infer.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the outputs of --infer.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows per step, for --train and --infer.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps to train. Default: those of the source.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Folder to run the command in. Default: the current folder.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job; its ID is the name and a number.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Weight of its part of the idle share, 1 to 100. Default: 1.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory limit, such as 2GiB. Default: `[jobs] memory` of the server.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", help="Time to finish by: 06:00, 2h (from now) or 2026-12-01T06:00.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", help="Number of restarts after failures. Default: 3.")
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            parser=parse_duration,
            metavar="DURATION",
            help="Time between the request to stop and the kill. Default: 10s.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Number of threads. Default: one per core of its device.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the job until it ends.")] = False,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Submit a job: --train, --infer, a job file, or a command after `--`. Options override those of a file."""
    from cotenant.cli.client import endpoint
    from cotenant.cli.jobs_client import submit_job
    from cotenant.config.jobs import parse_deadline, read_job
    from cotenant.core.units import parse_memory

    for option, value in (("--train", train), ("--infer", infer)):
        if value is not None and value.startswith("-"):
            raise ConfigError(f"{option}: its value is missing before {value}; write {option} and a name, then {value}")
    now = datetime.now().astimezone()
    given = [
        option
        for option, value in (("--file", file), ("--train", train), ("--infer", infer), ("a command", command))
        if value
    ]
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given) or 'nothing'} given: give one of --train, --infer, --file, or a command after `--`,"
            " such as: cotenant jobs submit --train digits"
        )
    options = {"input": input, "output": output, "batch": batch, "steps": steps, "directory": directory}
    if file is not None:
        request = read_job(file, now)
        _check_options("--file", (), options)
    else:
        request = JobRequest(work=_work(command, train, infer, options))
    changes = {
        "name": name,
        "priority": priority,
        "memory": None if memory is None else parse_memory(memory, "--memory"),
        "deadline": None if deadline is None else parse_deadline(deadline, "--deadline", now),
        "retries": retries,
        "grace": grace,
        "threads": threads,
    }
    request = msgspec.structs.replace(request, **{key: value for key, value in changes.items() if value is not None})
    request.job(1)  # so that what is wrong is said before anything is sent
    server = endpoint(address, token_file, ca_file)
    status = submit_job(server, request)
    if follow:
        _follow(server, status.job.id, json=json)
    elif json:
        show_json(status)
    else:
        _tell(status, f"submitted {status.job.id}")


def _work(
    command: list[str] | None, train: str | None, infer: str | None, options: Mapping[str, Path | int | None]
) -> Work:
    """Return the work that options name, with whole paths. Raises ConfigError for options of other work."""
    from cotenant.config.jobs import at_place

    if train:
        _check_options("--train", ("batch", "steps"), options)
        values: dict[str, Any] = {"source": train, "batch": options["batch"], "steps": options["steps"]}
        return at_place(Training(**values), Path.cwd())
    if infer:
        _check_options("--infer", ("input", "output", "batch"), options)
        if options["input"] is None or options["output"] is None:
            raise ConfigError(f"--infer {infer}: needs --input FILE and --output FILE")
        values = {"input": str(options["input"]), "output": str(options["output"]), "batch": options["batch"]}
        return at_place(BatchInference(model=infer, **values), Path.cwd())
    _check_options("a command", ("directory",), options)
    directory = None if options["directory"] is None else str(options["directory"])
    return at_place(Command(argv=tuple(command or ()), directory=directory), Path.cwd())


def _check_options(kind: str, fitting: Collection[str], options: Mapping[str, Path | int | None]) -> None:
    """Raise ConfigError for an option that this kind of work does not have."""
    for option, value in options.items():
        if value is not None and option not in fitting:
            where = "write it in the file" if kind == "--file" else "leave it out"
            raise ConfigError(f"--{option}: is not an option of {kind}; {where}")


@app.command("list")
def list_jobs(
    address: ServerAddress = LOCAL, json: Json = False, token_file: TokenFile = None, ca_file: CaFile = None
) -> None:
    """List the jobs, the share that they have used, and why they wait."""
    from cotenant.cli.client import endpoint
    from cotenant.cli.jobs_client import fetch_jobs
    from cotenant.render.jobs_table import job_notes, jobs_table

    listed = fetch_jobs(endpoint(address, token_file, ca_file))
    if json:
        show_json(listed)
        return
    now = datetime.now(UTC).timestamp()
    if listed.jobs:
        console.print(jobs_table(listed.jobs, now))
        for note in job_notes(listed.jobs, now):
            console.print(note, markup=False, highlight=False)
    else:
        aside.print("no jobs; submit one: cotenant jobs submit --train digits", highlight=False)
    if listed.problem:
        aside.print(f"[yellow]note[/] {escape(listed.problem)}", highlight=False, soft_wrap=True)


@app.command()
def show(
    job: JobName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show a job: progress, share used, and effect on serving."""
    from cotenant.cli.client import endpoint
    from cotenant.cli.jobs_client import fetch_job
    from cotenant.render.jobs_table import job_details

    status = fetch_job(endpoint(address, token_file, ca_file), job)
    if json:
        show_json(status)
    else:
        console.print(job_details(status, datetime.now().astimezone()))


@app.command()
def follow(
    job: JobName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Follow a job until it ends: print its output and progress. Exits with 1 if it does not succeed."""
    from cotenant.cli.client import endpoint

    _follow(endpoint(address, token_file, ca_file), job, json=json)


@app.command()
def pause(
    job: JobName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Pause a job: it gets no share until it is resumed; its process stays while there is memory for it."""
    _control("pause", job, address, token_file, ca_file, json=json)


@app.command()
def resume(
    job: JobName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Resume a paused job."""
    _control("resume", job, address, token_file, ca_file, json=json)


@app.command()
def cancel(
    job: JobName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Cancel a job: ask it to stop, and kill it after its grace period."""
    _control("cancel", job, address, token_file, ca_file, json=json)


def _control(verb: str, job: str, address: str, token_file: Path | None, ca_file: Path | None, *, json: bool) -> None:
    from cotenant.cli.client import endpoint
    from cotenant.cli.jobs_client import control_job

    status = control_job(endpoint(address, token_file, ca_file), job, verb)
    if json:
        show_json(status)
    else:
        _tell(status, status.job.id)


def _tell(status: JobStatus, what: str) -> None:
    reason = f": {status.reason}" if status.reason else ""
    aside.print(f"{what} ({status.state}{reason})", highlight=False, markup=False, soft_wrap=True)


def _follow(server: ServerEndpoint, id: str, *, json: bool) -> None:
    """Show a job until it ends. Raises FailedError where it does not succeed."""
    try:
        status = _follow_as_json(server, id) if json else _follow_for_people(server, id)
    except KeyboardInterrupt:
        aside.print(f"{id} goes on; cotenant jobs cancel {shlex.quote(id)} ends it", highlight=False, markup=False)
        raise
    if status.state is not JobState.SUCCEEDED:
        raise FailedError(f"job {id} {status.state}: {status.reason}")


def _follow_as_json(server: ServerEndpoint, id: str) -> JobStatus:
    from cotenant.cli.jobs_client import fetch_job

    told = None
    while True:
        status = fetch_job(server, id)
        if status != told:
            show_json(msgspec.json.encode(status, enc_hook=str))
            told = status
        if status.state.ended:
            return status
        time.sleep(PERIOD)


def _follow_for_people(server: ServerEndpoint, id: str) -> JobStatus:
    from cotenant.cli.job_progress import JobBar
    from cotenant.cli.jobs_client import fetch_job, fetch_output

    start = 0
    with JobBar() as bar:
        while True:
            status = fetch_job(server, id)
            while (output := fetch_output(server, id, start)).text or output.next < start:
                bar.print(output.text)
                start = output.next if output.text else 0  # shorter than it was: the output began anew
            bar.show(status)
            if status.state.ended:
                return status
            time.sleep(PERIOD)
