"""Compare the simulator with the live server: `cotenant validate` on the demo's models and plan.

    python -m benchmarks.live_vs_simulated [--seconds 60] [--load 0.3 0.6 0.9 1.2] [--repository models] [--json]

Target: p50, p99 and attainment within 5 % of the simulation with the same batches, at every load, for every model with
at least 200 requests; with fewer, sampling noise of a p99 exceeds that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from cotenant.cli.loading import load_settings, load_unplanned
from cotenant.cli.validate import SCALES, compare_loads, largest_difference, result_view
from cotenant.zoo import ZOO, build_models


def settings(repository: Path) -> str:
    """Return the demo's models as a settings file."""
    lines = [f'model_repository = "{repository.absolute()}"', 'objective = "rate"', 'grace = "1s"']
    for name, recipe in ZOO.items():
        if recipe.demo:
            lines += ["[[models]]", f'name = "{name}"', f'slo = "{recipe.slo}s"', f"rate = {recipe.weight}"]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, nargs="+", default=list(SCALES))
    parser.add_argument("--repository", type=Path, default=Path("models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    build_models(given.repository)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings.toml")
        path.write_text(settings(given.repository))
        wanted = load_settings(path)
        problem = load_unplanned(wanted).problem
        result = uvloop.run(
            compare_loads(problem, [str(path)], given.load, given.seconds, given.seed, lend=wanted.lend)
        )
    if given.json:
        print(msgspec.json.encode(result).decode())
        return
    Console(width=150).print(result_view(result))
    for row in result.loads:
        difference = largest_difference(row.simulated, row.live)
        print(f"live_vs_simulated: at {row.load:g} x the planned rates {difference} (target 5 %); {given.seconds:g} s")
        lent = ", idle share lent" if row.lent else ""
        print(f"  from the profiles alone{lent}: {largest_difference(row.profiled, row.live)}")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
