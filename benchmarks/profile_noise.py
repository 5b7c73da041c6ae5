"""Compare what noisy profiles count as with latencies of the same model, batch and share in other runs.

    python -m benchmarks.profile_noise

Profiles of nine models on an H100 were measured in one run; `pairs-green.csv` has latencies measured alone in others.
For the running maximum, which smoothing never exceeds, for isotonic regression, and for what profiles count as: the
mean and the root mean square of the logarithm of counted over measured, and how many are longer than counted by more
than 5 and 10 %.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import msgspec
import numpy as np

from cotenant.config import read_profiles_file
from cotenant.core.isotonic import isotonic_grid
from cotenant.core.profile import Profile, parse_share

FOLDER = Path(__file__).parents[1] / "data" / "gpu" / "h100-80gb-hbm3"


def main() -> None:
    profiles = read_profiles_file(FOLDER / "profiles-green.csv")
    with (FOLDER / "pairs-green.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(f"{len(rows)} latencies    mean     rms    > 5 %   > 10 %")
    for name, smooth in (("maximum", _maximum), ("regression", _regression), ("counted", lambda profile: profile)):
        smoothed = {key: smooth(profile) for key, profile in profiles.items()}
        errors = []
        for row in rows:
            share = parse_share(float(row["share_pct"]), "pairs-green.csv")
            counted = smoothed[row["victim"], row["kind"]].latency(int(row["batch"]), share)
            errors.append(math.log(1e3 * counted / float(row["alone_ms"])))
        e = np.array(errors)
        rms = math.sqrt(float(np.mean(e**2)))
        late = [float(np.mean(np.exp(-e) > 1 + above)) for above in (0.05, 0.1)]
        print(f"{name:14}{e.mean():8.3f}{rms:8.3f}{late[0]:9.1%}{late[1]:9.1%}")


def _maximum(profile: Profile) -> Profile:
    """Return the profile with each point as slow as the slowest with fewer rows or more share."""
    points = [
        msgspec.structs.replace(
            point,
            latency=max(
                each.latency for each in profile.points if each.batch <= point.batch and each.share >= point.share
            ),
        )
        for point in profile.points
    ]
    return Profile(profile.model, profile.kind, points)


def _regression(profile: Profile) -> Profile:
    """Return the profile with each point on the isotonic regression."""
    shares, batches = profile.shares, sorted({point.batch for point in profile.points})
    grid = np.full((len(shares), len(batches)), math.nan)
    for point in profile.points:
        grid[shares.index(point.share), batches.index(point.batch)] = math.log(point.latency)
    fitted = np.exp(isotonic_grid(grid))
    # What convergence leaves of contradictions, so that it does not count as such.
    fitted = np.fmax.accumulate(np.fmax.accumulate(fitted, axis=1)[::-1], axis=0)[::-1]
    points = [
        msgspec.structs.replace(point, latency=float(fitted[shares.index(point.share), batches.index(point.batch)]))
        for point in profile.points
    ]
    return Profile(profile.model, profile.kind, points)


if __name__ == "__main__":
    main()
