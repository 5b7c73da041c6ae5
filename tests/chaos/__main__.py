"""`make chaos`: as many schedules as are asked for, from a seed on, of one machine or of many."""

from __future__ import annotations

import argparse
import sys
import time

from tests.chaos import schedule, world
from tests.chaos.cluster import schedule as cluster_schedule
from tests.chaos.cluster import world as cluster_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machines", choices=("one", "many"), default="one")
    options = parser.parse_args()
    begun, failures = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.count):
        if options.machines == "one":
            found = world.failure(schedule.make(seed))
        else:
            found = cluster_world.failure(cluster_schedule.make(seed))
        if found:
            failures += 1
            sys.stdout.write(f"{found}\n\n")
            sys.stdout.flush()
    seconds = time.monotonic() - begun
    sys.stdout.write(f"{options.count} seeds from {options.seed}, {failures} failed, {seconds:.0f} s\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
