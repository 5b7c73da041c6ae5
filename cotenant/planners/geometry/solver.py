"""Run HiGHS for a counted amount of work.

HiGHS has no limit of work that is the same in every run, but asks now and then whether to go on (an interrupt check),
between parts of its work that are. So integer programs end after so many checks. Its own time limit is not used: it
goes by a clock of its own, which runs on while other programs have the processor.
"""

from __future__ import annotations

import math

import highspy

from cotenant.planners.geometry.budget import Deadline

MIN_CHECKS = 20  # to find any solution
SECONDS_PER_CHECK = 4e-4  # of work, from one check to the next; with that by entry fitted to 436 programs
SECONDS_PER_CHECK_AND_ENTRY = 5e-7  # and for each entry of the matrix
# Of a linear program, for each simplex iteration: by row and by entry of the matrix.
SECONDS_PER_ITERATION_AND_ROW = 3e-8
SECONDS_PER_ITERATION_AND_ENTRY = 5e-9


def seconds_per_check(entries: int) -> float:
    """Return the seconds of work from one interrupt check to the next, for a matrix of so many entries."""
    return SECONDS_PER_CHECK + SECONDS_PER_CHECK_AND_ENTRY * entries


def seconds_per_iteration(rows: int, entries: int) -> float:
    """Return the seconds of work of a simplex iteration of a linear program."""
    return SECONDS_PER_ITERATION_AND_ROW * rows + SECONDS_PER_ITERATION_AND_ENTRY * entries


def checks_for(work: float, entries: int) -> float:
    """Return how many interrupt checks amount to about so much work."""
    return max(MIN_CHECKS, work / seconds_per_check(entries))


def run_solver(highs: highspy.Highs, checks: float = math.inf, deadline: Deadline | None = None) -> int:
    """Run the solver until it ends by itself, has made so many interrupt checks at an integer program, or the deadline
    passes.

    Returns the checks that it made.
    """
    made = 0

    def count(event: highspy.highs.HighsCallbackEvent) -> None:
        nonlocal made
        made += 1
        if made > checks or (deadline is not None and deadline.seconds_left() <= 0):
            event.interrupt()

    def read_clock(event: highspy.highs.HighsCallbackEvent) -> None:
        assert deadline is not None
        if deadline.seconds_left() <= 0:
            event.interrupt()

    timed = deadline is not None and deadline.is_timed
    highs.cbMipInterrupt += count
    if timed:
        highs.cbSimplexInterrupt += read_clock
    highs.run()
    highs.cbMipInterrupt -= count
    if timed:
        highs.cbSimplexInterrupt -= read_clock
    return made
