"""How Hypothesis searches: the same inputs in every run, however slow the machine is.

A failure then belongs to the change at hand. `pytest --hypothesis-profile random` searches other inputs each time;
what it finds becomes an `@example` or a test of its own.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before numpy is loaded, so this file imports nothing that does: threads of linear algebra wait for each other by
# spinning, and beside another process of tests they spin more than they compute. Workers and solvers have one thread
# each, too.
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

# Tests in several processes are told of a terminal with 80 columns that none of them has.
os.environ.pop("COLUMNS", None)

# A job of a shell in the background ignores SIGINT, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through the tests and all that they import, some 700,000 objects, again
    and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this process plan as on a quiet machine, whatever runs beside the tests."""
    from cotenant.planners.front_end import REQUEST_SECONDS

    monkeypatch.setattr("cotenant.app.startup.measure_load", lambda: None)
    monkeypatch.setattr("cotenant.app.deployment_builder.request_seconds", lambda: REQUEST_SECONDS)


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Log as before the test after it: commands set what is logged in their process, which here runs other tests."""
    loggers = [logging.getLogger(name) for name in (None, "cotenant", "cotenant.access")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    for logger, (level, propagate, disabled) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
