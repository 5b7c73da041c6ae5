"""Turn a job into what its shim is to start, and the environment that it gets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cotenant.backends import Launch
from cotenant.core.job import BatchInference, Command, Job, Training
from cotenant.live.confinement import Confinement
from cotenant.worker.jobs.inference import InferenceWork
from cotenant.worker.jobs.messages import Attempt
from cotenant.worker.jobs.steps import StepWork
from cotenant.worker.wire import WorkerModel

OUTPUT = "output.txt"
CHECKPOINT = "checkpoint"
WORK = "work"
_INFER = "cotenant.worker.jobs.inference:infer"

# Threads that wait for each other do not spin: that would take share-seconds and give nothing.
_NO_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What attempts are made of besides the job.

    folder: of all jobs. function: returns the generator function of a training, as ``module:name``; raises ConfigError.
    model: returns a model for batch inference; raises CotenantError. environment: variables that jobs get besides the
    usual ones. background: they run where nobody else wants a processor, which on a busy machine may be never.
    """

    folder: Path
    function: Callable[[Training], str]
    model: Callable[[str], WorkerModel]
    environment: tuple[str, ...] = ()
    background: bool = True

    def folder_of(self, job: str) -> Path:
        return self.folder / job

    def attempt(self, job: Job, number: int, launch: Launch) -> Attempt:
        """Return the attempt of that number. Raises CotenantError for work that cannot be found, OSError where its
        folder cannot be made."""
        folder = self.folder_of(job.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv, directory = self._program(job, launch)
        return Attempt(
            argv=argv,
            directory=directory or str(folder / WORK),
            own_directory=not directory,
            output=str(folder / OUTPUT),
            header=f"--- attempt {number} ---" if number > 1 else "",
            memory=job.memory,
            cores=launch.cores,
            background=self.background,
            waits=launch.cuda and not isinstance(job.work, Command),
            tells_end=not isinstance(job.work, Command),
        )

    def environ(self, job: Job, launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a job, of that of the server."""
        confinement = Confinement(environment=self.environment)
        threads = dict.fromkeys(_THREADS, str(job.threads or launch.threads))
        home = {"COTENANT_JOB": job.id, "COTENANT_JOB_DIRECTORY": str(self.folder_of(job.id) / CHECKPOINT)}
        return {**confinement.environ(environ), **_NO_SPINNING, **threads, **home, **launch.env}

    def _program(self, job: Job, launch: Launch) -> tuple[tuple[str, ...], str]:
        """Return the program of a job with its arguments, and the folder in which it begins; "": one of its own. Python
        jobs begin where the server runs, from where it may import what they do, and change into their own."""
        match job.work:
            case Command(argv=argv, directory=directory):
                return argv, directory or ""
            case Training(batch=batch, steps=steps) as training:
                return _stepping(self._steps(job, launch, self.function(training), batch=batch, steps=steps)), str(
                    Path.cwd()
                )
            case BatchInference(model=model, input=source, output=target, batch=batch):
                # The job leaves the folder in which the server runs, which paths may be relative to.
                runs = self.model(model)
                work = InferenceWork(
                    model=msgspec.structs.replace(runs, path=_absolute(runs.path)),
                    input=_absolute(source),
                    output=_absolute(target),
                    fake=launch.fake,
                )
                options = msgspec.to_builtins(work)
                return _stepping(self._steps(job, launch, _INFER, batch=batch, options=options)), str(Path.cwd())

    def _steps(self, job: Job, launch: Launch, function: str, **options: object) -> StepWork:
        return msgspec.structs.replace(
            StepWork(
                function=function,
                directory=str(self.folder_of(job.id) / CHECKPOINT),
                work=str(self.folder_of(job.id) / WORK),
                threads=job.threads or launch.threads,
                cuda=launch.cuda,
                groups=launch.process != "",
            ),
            **options,
        )


def _stepping(work: StepWork) -> tuple[str, ...]:
    return (sys.executable, "-m", "cotenant.worker.jobs.steps", msgspec.json.encode(work).decode())


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
