"""Run HiGHS on an integer program for a counted amount of work.

HiGHS has no limit of work that is the same in every run, but asks now and then whether to go on ("looks"), between parts
of its work that are. So integer programs end after so many looks; a time limit would end each run elsewhere.
"""

from __future__ import annotations

import highspy

MIN_LOOKS = 20  # to find any solution
SECONDS_PER_LOOK = 4e-4  # of work, from one look to the next; with that by entry fitted to 436 programs
SECONDS_PER_LOOK_AND_ENTRY = 5e-7  # and for each entry of the matrix


def seconds_per_look(entries: int) -> float:
    """Return the seconds of work from one look to the next, for a matrix of so many entries."""
    return SECONDS_PER_LOOK + SECONDS_PER_LOOK_AND_ENTRY * entries


def looks_for(work: float, entries: int) -> float:
    """Return how many looks amount to about so much work."""
    return max(MIN_LOOKS, work / seconds_per_look(entries))


def run_with_looks(highs: highspy.Highs, most: float) -> int:
    """Run the solver until it ends by itself or has taken so many looks, and return how many it took."""
    taken = 0

    def look(event: highspy.highs.HighsCallbackEvent) -> None:
        nonlocal taken
        taken += 1
        if taken > most:
            event.interrupt()

    highs.cbMipInterrupt += look
    highs.run()
    highs.cbMipInterrupt -= look
    return taken
