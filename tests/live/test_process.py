from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cotenant.live.process import cpu_time, private_memory


def test_cpu_time_of_a_process_is_what_the_process_says_itself() -> None:
    code = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.2: pass\nprint(time.process_time())"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = float(process.stdout.readline())
        assert cpu_time(process.pid) == pytest.approx(told, abs=0.05)
        process.communicate("\n")


def test_cpu_time_of_this_process_grows_as_it_works() -> None:
    before = cpu_time(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = cpu_time(os.getpid())
    assert before is not None and after is not None
    assert after - before == pytest.approx(0.05, abs=0.03)


def test_usage_of_a_process_that_has_ended_is_unknown() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_time(process.pid) is None
    assert private_memory(process.pid) == 0
