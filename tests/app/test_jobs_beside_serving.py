"""Jobs that behave badly beside a real server: every request is answered, and nothing of them is left."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cotenant.app import jobs as app_jobs
from cotenant.app.backend import create_backend
from cotenant.app.jobs import running_jobs
from cotenant.app.lifecycle import running
from cotenant.app.settings import settings_from
from cotenant.control.jobs.events import JobCancelAsked, JobSubmitted
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.job import Command, Job, JobState
from cotenant.live.jobs.attempts import Preparation
from cotenant.live.jobs.idle_share import IdleMeter
from tests.live.jobs.shims import LIMIT, in_loop, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are held by means of Linux")

ROW = np.arange(16, dtype=np.float32).reshape(1, 16)
BAD = {
    "forks": "import os, time\nfor _ in range(6): os.fork()\nos.setsid()\nwhile True: time.sleep(0.01)",
    "ignores": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(0.01)",
    "eats": "kept = [bytearray(1 << 20) for _ in range(1 << 12)]",
    "writes": "while True: print('x' * 10000)",
    "dies": "import os\nos.abort()",
    "spins": "while True: pass",
}


@in_loop
async def test_every_request_is_answered_beside_jobs_that_behave_badly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jobs run however busy the machine is: what is tested here is what becomes of them, and of requests.
    monkeypatch.setattr(app_jobs, "Preparation", partial(Preparation, background=False))
    monkeypatch.setattr(IdleMeter, "read", lambda *_: 1000)
    path = folder / "serve.toml"
    # What is tested here is not speed; a machine with much to do takes some time to answer.
    path.write_text(path.read_text().replace('"2s"', '"30s"').replace('"5s"', '"60s"'))
    settings = settings_from("serve.toml")
    backend = create_backend(settings)
    scheduler = JobScheduler()
    async with (
        running(settings, backend) as server,
        running_jobs(server._server, backend, scheduler, folder / "jobs", grace=0.1) as jobs,
    ):
        for name, program in BAD.items():
            work = Command(argv=(sys.executable, "-c", program))
            memory = 256 << 20 if name == "eats" else None
            jobs.feed(JobSubmitted(Job(id=f"{name}-1", name=name, work=work, retries=0, grace=0.1, memory=memory)))
        asked = 0

        def have_run() -> bool:
            failed = {status.job.name for status in jobs.statuses() if status.state is JobState.FAILED}
            return failed >= {"dies", "eats"} and all(status.attempt for status in jobs.statuses())

        async def ask_until_all_have_run() -> None:
            nonlocal asked
            while asked < 100 or not have_run():
                answer = await server.infer("identity", {"x": ROW})
                assert answer["y"].tolist() == ROW.tolist()
                asked += 1
                await asyncio.sleep(0.01)

        await asyncio.wait_for(ask_until_all_have_run(), LIMIT)
        for name in BAD:
            jobs.feed(JobCancelAsked(f"{name}-1"))
        await until(lambda: all(status.state.ended for status in jobs.statuses()))
        states = {status.job.name: status.state for status in jobs.statuses()}
        assert {name for name, state in states.items() if state is JobState.FAILED} >= {"dies", "eats"}
        assert JobState.SUCCEEDED not in states.values()
        assert server._server.runs_jobs is False
