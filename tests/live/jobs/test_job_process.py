"""Jobs that behave badly under a real shim: each ends with its reason, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotenant.live.process import cpu_time
from cotenant.worker.jobs.output_file import LIMIT
from cotenant.worker.jobs.process_tree import descendants
from tests.live.jobs.shims import LIMIT as PATIENCE
from tests.live.jobs.shims import Watched, in_loop, is_alive, state_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are held by means of Linux")

FOREVER = "while True: time.sleep(0.01)"


@in_loop
async def test_job_that_exits_in_good_order_completes_with_its_output(tmp_path: Path) -> None:
    job = Watched(tmp_path, "print('hello'); print('error', file=sys.stderr)")
    job.process.grant(1000, None)
    end = await job.ended()
    assert end.completed and not end.reason
    assert sorted(job.output.read_text().split()) == ["error", "hello"]


@in_loop
async def test_job_runs_in_the_background_and_first_for_the_oom_killer(tmp_path: Path) -> None:
    job = Watched(tmp_path, argv=("sleep", "1000"), background=True)

    def confined(pid: int) -> tuple[int, int, str]:
        score = Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
        return os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid), score

    await until(lambda: [confined(pid) for pid in descendants(job.process.pid)] == [(os.SCHED_IDLE, 19, "1000")])
    job.process.kill("enough")
    await job.ended()


@in_loop
async def test_failing_job_ends_with_status_and_last_line(tmp_path: Path) -> None:
    job = Watched(tmp_path, "print('no such data', flush=True); sys.exit(7)")
    job.process.grant(1000, None)
    end = await job.ended()
    assert (end.completed, end.reason, end.hopeless) == (False, "it exited with status 7: no such data", False)


@in_loop
async def test_job_that_dies_by_a_signal_says_which(tmp_path: Path) -> None:
    job = Watched(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    job.process.grant(1000, None)
    assert (await job.ended()).reason == "it was killed by SIGSEGV"


@in_loop
async def test_job_is_of_the_servers_session_so_that_its_priority_counts(tmp_path: Path) -> None:
    """Where the kernel shares processors out over sessions first, SCHED_IDLE counts only within one."""
    job = Watched(tmp_path, "say('pid', os.getpid())\n" + FOREVER, background=True)
    job.process.grant(1000, None)
    pid = int(await job.said("pid"))
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid
    job.process.kill("enough")
    await job.ended()


def test_job_has_no_terminal_to_wait_at() -> None:
    """The server may have been started at one, and a job that reads there in the background is stopped."""
    job = """if True:
    from cotenant.worker.jobs import shim
    open('/dev/tty').close()
    shim._leave_terminal()
    try: open('/dev/tty')
    except OSError as error: print(error.strerror)
    """
    leader = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], process_group=0, check=True)"
    terminal = "import pty, sys; pty.spawn(sys.argv[1:])"
    argv = [sys.executable, "-c", terminal, sys.executable, "-c", leader, job]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "No such device or address"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not schedule sessions")
@in_loop
async def test_session_that_a_job_makes_comes_last(tmp_path: Path) -> None:
    program = """
    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
    say('child', child.pid)
    while True: time.sleep(0.01)
    """
    job = Watched(tmp_path, program, background=True)
    job.process.grant(1000, None)
    group = Path(f"/proc/{await job.said('child')}/autogroup")
    await until(lambda: group.read_text().endswith("nice 19\n"))
    assert not Path("/proc/self/autogroup").read_text().endswith("nice 19\n")
    job.process.kill("enough")
    await job.ended()


@in_loop
async def test_program_that_is_not_there_is_hopeless(tmp_path: Path) -> None:
    job = Watched(tmp_path, argv=("/no/such/program",))
    end = await job.ended()
    assert (end.reason, end.hopeless) == ("/no/such/program: No such file or directory", True)


@in_loop
async def test_folder_that_is_not_there_is_hopeless(tmp_path: Path) -> None:
    job = Watched(tmp_path, argv=("true",), directory=tmp_path / "gone")
    end = await job.ended()
    assert (end.reason, end.hopeless) == (f"{tmp_path / 'gone'}: No such file or directory", True)


@in_loop
async def test_job_that_forks_and_leaves_its_session_is_killed_whole(tmp_path: Path) -> None:
    """Each grandchild makes a session of its own, loses its parent and ignores every signal that it may."""
    program = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(each, signal.SIG_IGN)
                say(f'grandchild{number}', os.getpid())
                while True: time.sleep(0.01)
            os._exit(0)
    while True: time.sleep(0.01)
    """
    job = Watched(tmp_path, program)
    job.process.grant(1000, None)
    pids = [int(await job.said(f"grandchild{number}")) for number in range(5)]
    job.process.tell()
    job.process.kill("its grace is over")
    end = await job.ended()
    assert end.reason == "its grace is over"
    assert not any(is_alive(pid) for pid in pids)


@in_loop
async def test_what_a_job_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    program = """
    if os.fork() == 0:
        os.setsid()
        say('left', os.getpid())
        while True: time.sleep(0.01)
    while not os.path.exists('left'): time.sleep(0.01)
    """
    job = Watched(tmp_path, program)
    job.process.grant(1000, None)
    assert (await job.ended()).completed
    assert not is_alive(int(await job.said("left")))


@in_loop
async def test_share_of_zero_stops_all_processes_and_a_grant_lets_them_go_on(tmp_path: Path) -> None:
    program = """
    busy = 'import time\\nwhile True: time.sleep(0.001)'
    child = subprocess.Popen([sys.executable, '-c', busy], start_new_session=True)
    say('child', child.pid); say('own', os.getpid())
    while True: time.sleep(0.001)
    """
    job = Watched(tmp_path, program)
    job.process.grant(1000, None)
    pids = [int(await job.said(name)) for name in ("own", "child")]
    job.process.grant(0, None)
    await until(lambda: [state_of(pid) for pid in pids] == ["T", "T"])
    job.process.grant(500, None)
    await until(lambda: not {state_of(pid) for pid in pids} & {"T"})
    job.process.kill("enough")
    await job.ended()


@in_loop
async def test_job_does_nothing_before_it_is_granted_a_share(tmp_path: Path) -> None:
    job = Watched(tmp_path, "say('began')\n" + FOREVER)
    await until(lambda: [state_of(pid) for pid in descendants(job.process.pid)] == ["T"])
    assert not (tmp_path / "began").exists()
    job.process.grant(1, None)
    await job.said("began")
    job.process.kill("enough")
    await job.ended()


@pytest.mark.parametrize("tells_end", [False, True])
@in_loop
async def test_job_that_is_told_runs_although_it_has_no_share(tmp_path: Path, tells_end: bool) -> None:
    """One that saves and exits in good order is not done for that, unless it is one that says so."""
    program = """
    def save(*_):
        say('saved'); sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    say('began')
    while True: time.sleep(0.01)
    """
    job = Watched(tmp_path, program, tells_end=tells_end)
    job.process.grant(1000, None)
    await job.said("began")
    job.process.grant(0, None)
    job.process.tell()
    job.process.grant(0, None)
    end = await job.ended()
    assert (end.completed, end.reason) == (tells_end, "" if tells_end else "it was asked to stop")
    assert (tmp_path / "saved").exists()


@in_loop
async def test_job_that_ignores_being_told_is_killed_with_the_reason(tmp_path: Path) -> None:
    job = Watched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('began')\n" + FOREVER)
    job.process.grant(1000, None)
    await job.said("began")
    job.process.tell()
    job.process.kill("it did not stop")
    assert (await job.ended()).reason == "it did not stop"


@in_loop
async def test_output_without_end_is_bounded_and_the_job_goes_on(tmp_path: Path) -> None:
    program = f"""
    line = b'x' * 65536
    for _ in range({3 * LIMIT >> 16}):
        os.write(1, line)
    say('done')
    """
    job = Watched(tmp_path, program)
    job.process.grant(1000, None)
    assert (await job.ended()).completed
    assert (tmp_path / "done").exists()
    text = job.output.read_bytes()
    assert len(text) < LIMIT + 200
    assert text.endswith(b"[more than 1048576 bytes were printed: the rest is dropped]\n")


@in_loop
async def test_job_that_allocates_more_than_its_memory_fails(tmp_path: Path) -> None:
    job = Watched(tmp_path, "kept = [bytearray(1 << 20) for _ in range(1 << 10)]", memory=256 << 20)
    job.process.grant(1000, None)
    end = await job.ended()
    assert not end.completed and "MemoryError" in end.reason


@in_loop
async def test_job_whose_processes_together_take_more_than_its_memory_is_killed(tmp_path: Path) -> None:
    program = """
    for _ in range(4):
        if os.fork() == 0: break
    kept = b'x' * (48 << 20)
    while True: time.sleep(0.01)
    """
    job = Watched(tmp_path, program, memory=128 << 20)
    job.process.grant(1000, None)
    end = await job.ended()
    assert end.reason.startswith("it used ") and end.reason.endswith(" of memory and may have 128 MiB")


@in_loop
async def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    program = """
    kept = b'x' * (64 << 20)
    for number in range(4):
        if os.fork() == 0: break
    else:
        say('forked')
    while True: time.sleep(0.01)
    """
    job = Watched(tmp_path, program, memory=160 << 20)
    job.process.grant(1000, None)
    await job.said("forked")
    seen = len(job.reports)
    await until(lambda: len(job.reports) > seen + 2)
    job.process.kill("enough")
    assert (await job.ended()).reason == "enough"


@in_loop
async def test_job_that_closes_what_it_inherited_keeps_its_shim_asleep(tmp_path: Path) -> None:
    job = Watched(tmp_path, "os.closerange(0, 100)\nsay('closed')\n" + FOREVER)
    job.process.grant(1000, None)
    await job.said("closed")
    begun, used, seen = time.monotonic(), cpu_time(job.process.pid), len(job.reports)
    await until(lambda: len(job.reports) > seen + 3)
    assert (cpu_time(job.process.pid) or 0.0) - (used or 0.0) < 0.3 * (time.monotonic() - begun)
    job.process.kill("enough")
    await job.ended()


@in_loop
async def test_reports_count_the_processor_time_of_processes_that_are_gone(tmp_path: Path) -> None:
    program = """
    work = 'import time\\nwhile time.process_time() < 0.4: pass'
    subprocess.run([sys.executable, '-c', work]); subprocess.Popen([sys.executable, '-c', work]).wait()
    """
    job = Watched(tmp_path, program)
    job.process.grant(1000, None)
    assert (await job.ended()).processor >= 0.75


@in_loop
async def test_server_that_is_killed_takes_its_jobs_along(tmp_path: Path) -> None:
    """The server is a process that starts a job and is killed without a chance to do anything."""
    program = f"""
import asyncio, pathlib
from tests.live.jobs.shims import Watched
async def main():
    job = Watched(pathlib.Path({str(tmp_path)!r}), '''
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    say("child", os.getpid())
else:
    say("own", os.getpid())
while True: time.sleep(0.01)
''')
    job.process.grant(1000, None)
    pathlib.Path({str(tmp_path / "shim")!r}).write_text(str(job.process.pid))
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", program])
    try:
        watch = [tmp_path / name for name in ("own", "child", "shim")]
        await until(lambda: server.poll() is not None or all(path.exists() for path in watch))
        pids = [int(path.read_text()) for path in watch]
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids))


@in_loop
async def test_shim_that_is_killed_takes_its_job_along(tmp_path: Path) -> None:
    job = Watched(tmp_path, "say('own', os.getpid())\n" + FOREVER)
    job.process.grant(1000, None)
    pid = int(await job.said("own"))
    await until(lambda: job.reports)
    os.kill(job.process.pid, signal.SIGKILL)
    end = await asyncio.wait_for(job.end, PATIENCE)
    assert end.reason == "the process that held it ended"
    await until(lambda: not is_alive(pid))


@in_loop
async def test_what_is_sent_to_a_job_that_is_about_to_be_gone_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Watched(tmp_path, "pass")
    closed: list[float] = []
    reap = job.process._reap
    monkeypatch.setattr(job.process, "_reap", closed.append)  # its shim is waited for until the test goes on
    job.process.grant(1000, None)
    await until(lambda: closed)
    job.process.grant(0, None)
    job.process.tell()
    job.process.kill("late")
    monkeypatch.setattr(job.process, "_reap", reap)
    reap(closed[0])
    assert (await job.ended()).completed


@in_loop
async def test_later_attempt_continues_the_output(tmp_path: Path) -> None:
    for word in ("one", "two"):
        job = Watched(tmp_path, f"print({word!r})")
        job.process.grant(1000, None)
        await job.ended()
    assert job.output.read_text() == "one\ntwo\n"
