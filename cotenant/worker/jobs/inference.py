"""Run a model over a file of inputs, one batch a step."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cotenant.errors import ConfigError, ModelError
from cotenant.worker.jobs.context import JobContext, Steps, step
from cotenant.worker.jobs.input_rows import open_inputs
from cotenant.worker.jobs.output_rows import OutputRows
from cotenant.worker.runners import load_runner
from cotenant.worker.runners.arrays import Array
from cotenant.worker.wire import WorkerModel

NO_INPUTS = "the file of inputs has no rows"


class InferenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """Describe batch inference. fake: the model sleeps as long as its profile says."""

    model: WorkerModel
    input: str
    output: str
    fake: bool = False


def infer(job: JobContext) -> Steps:
    """Run `job.options`, an `InferenceWork`. Steps are batches. Raises ConfigError, ModelError."""
    work = msgspec.convert(job.options, InferenceWork)
    model, source, target = work.model, Path(work.input), Path(work.output)
    size = min(job.batch or model.max_batch, model.max_batch) if model.batched else 1
    inputs = open_inputs(source, model.inputs, batched=model.batched)
    if not inputs.total:
        raise ConfigError(f"{source}: {NO_INPUTS}")
    stamp = source.stat()
    asked = f"{model.name} {model.path} {source} {stamp.st_size} {stamp.st_mtime_ns} {target}"
    outputs = OutputRows(target, job.directory, asked)
    try:
        # Batches are of one size, the last may be smaller.
        model = msgspec.structs.replace(model, max_batch=size, graphs=((size, 1),) if model.graphs else ())
        stream = 0 if job.cuda else None
        runner, _ = load_runner(model, threads=job.threads, fake=work.fake, stream=stream)
        total = -(-inputs.total // size)
        for batch in inputs.batches(outputs.rows, size):
            rows = len(next(iter(batch.values())))
            fed = batch if model.batched else {name: array[0] for name, array in batch.items()}
            begun = time.monotonic()
            answers: list[tuple[str, Array]] = runner.run(fed)
            time.sleep(max(begun + runner.minimum_seconds(rows) - time.monotonic(), 0.0))
            if not model.batched:
                answers = [(name, array[None]) for name, array in answers]
            elif wrong := next((name for name, array in answers if array.shape[:1] != (rows,)), None):
                raise ModelError(f"output {wrong!r} of {model.name} has not one row for each of the inputs")
            outputs.append(answers, rows)
            yield step(-(-outputs.rows // size), total, rows=outputs.rows)
        outputs.finish()
    finally:
        outputs.close()
