"""`make chaos`: as many schedules as are asked for, from a seed on."""

from __future__ import annotations

import argparse
import sys
import time

from tests.chaos.schedule import make
from tests.chaos.world import failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun, failures = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.count):
        if found := failure(make(seed)):
            failures += 1
            sys.stdout.write(f"{found}\n\n")
            sys.stdout.flush()
    seconds = time.monotonic() - begun
    sys.stdout.write(f"{options.count} seeds from {options.seed}, {failures} failed, {seconds:.0f} s\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
