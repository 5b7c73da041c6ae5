"""How fast does a server follow when its load, or what other programs leave it, changes at once?

`python -m benchmarks.step [--seconds S] [--models NAME …] [--no-adapt] [--json]`

Example models are served on shares of the processor. A rate doubles, within 70 % of capacity; then other programs take
one core, then two; then they end. Each of these five phases lasts `--seconds`. Reported for each: attainment in its
first 10 seconds and after them, requests rejected included, and when a plan made after its beginning was in force.
`--no-adapt`: the same with the first plan throughout.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.adaptive import Segment, Tick, arguments, attainment, foreign_programs, sending, served

SETTLED = 10.0  # seconds after the beginning of a phase


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """attainment: in the first `SETTLED` seconds, and from then on. plans: rollouts that ended within it. in_force:
    seconds until the first of them; None where there was none. said: the controller's last word of what is short."""

    name: str
    attainment_first: float
    attainment_later: float
    plans: int
    in_force_s: float | None
    short: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    adapt: bool
    phases: tuple[Phase, ...]
    load_average: float


PHASES = (("planned rates", 0), ("a rate doubled", 0), ("one core taken", 1), ("two cores taken", 2), ("cores back", 0))


async def measure(repository: Path, names: list[str], seconds: float, seed: int, *, adapt: bool) -> Result:
    async with served(repository, names, adapt=adapt) as given:
        doubled = max(given.rates, key=lambda name: given.rates[name])
        full = given.rates
        half = full | {doubled: full[doubled] / 2}  # of a plan that was made for twice that
        statistics = given.server._server._rollouts.statistics
        segments = [Segment(seconds, half), Segment(seconds * (len(PHASES) - 1), full)]
        ticks: list[Tick] = []
        ended: list[float] = []
        shorts: list[tuple[float, str]] = []
        begun: list[float] = []

        async def watch() -> None:
            seen = set[int]()
            while True:
                now = time.monotonic() - begun[0]
                for past in statistics.last:
                    if past.revision.number not in seen:
                        seen.add(past.revision.number)
                        ended.append(now)
                status = await given.server.status()
                if status.adaptation is not None:
                    shorts.append((now, status.adaptation.short))
                await asyncio.sleep(0.2)

        async def disturb() -> None:
            with ExitStack() as taken:
                for number, (_, cores) in enumerate(PHASES):
                    await asyncio.sleep(max(0.0, number * seconds - (time.monotonic() - begun[0])))
                    taken.close()
                    taken.enter_context(foreign_programs(cores))
                await asyncio.sleep(seconds)

        tasks: list[asyncio.Task[None]] = []
        async for tick in sending(given.address, segments, seed):
            if not begun:
                begun.append(time.monotonic() - tick.seconds)
                tasks = [asyncio.create_task(watch()), asyncio.create_task(disturb())]
            ticks.append(tick)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Result(
        adapt=adapt,
        phases=tuple(
            Phase(
                name=name,
                attainment_first=attainment(ticks, number * seconds, number * seconds + SETTLED),
                attainment_later=attainment(ticks, number * seconds + SETTLED, (number + 1) * seconds),
                plans=len(inside := [t for t in ended[1:] if number * seconds <= t < (number + 1) * seconds]),
                in_force_s=min(inside) - number * seconds if inside else None,
                short=next((s for t, s in reversed(shorts) if t < (number + 1) * seconds), ""),
            )
            for number, (name, _) in enumerate(PHASES)
        ),
        load_average=os.getloadavg()[0],
    )


def main() -> None:
    parser = arguments(__doc__, 30.0)
    parser.add_argument("--no-adapt", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(measure(args.model_repository, args.models, args.seconds, args.seed, adapt=not args.no_adapt))
    if args.json:
        print(msgspec.json.encode(result).decode())
        return
    for phase in result.phases:
        after = (
            "no new plan" if phase.in_force_s is None else f"{phase.plans} plans, first {phase.in_force_s:.1f} s after"
        )
        print(
            f"{phase.name:16} {phase.attainment_first * 100:6.2f} % in the first {SETTLED:g} s, "
            f"{phase.attainment_later * 100:6.2f} % later; {after}{'; ' + phase.short if phase.short else ''}"
        )
    print(f"{'adapting' if result.adapt else 'one plan throughout'}; load average {result.load_average:.1f}")


if __name__ == "__main__":
    main()
