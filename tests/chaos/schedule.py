"""What happens in a run, and when: made from a seed, printed where it fails, and shrunk to what the failure needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec

from cotenant.control.revision import MemoryPolicy

SECONDS = 8.0  # within which everything happens
MODELS = ("a", "b", "c")
DEVICES = 2
# What a worker may do instead of answering, starting or ending.
BATCH_FAULTS = (
    "die", "stall", "slow", "twice", "other-batch", "too-few", "too-many", "garbage", "endless", "outside", "fails",
    "fails-partly", "pieces", "piece-and-die", "closes",
)  # fmt: skip
START_FAULTS = ("broken", "exits", "never", "slow", "garbage", "twice")
SYSTEM_FAULTS = ("no-process", "no-partition", "no-close", "no-hook", "undying")


class Step(msgspec.Struct, frozen=True):
    """One thing that happens. what: its kind; which: a number whose meaning is the kind's; more: the same."""

    time: float
    what: str
    which: int = 0
    more: float = 0.0
    how: str = ""

    def __str__(self) -> str:
        return f"{self.time:7.3f} s  {self.what} {self.how} {self.which} {self.more:g}"


class Schedule(msgspec.Struct, frozen=True):
    """A run. shared: lanes of a device share a process. warm: pre-started workers. in_place: shares change without a
    new worker. standbys: standby workers of each device. steps: in order of time."""

    seed: int
    memory: MemoryPolicy
    shared: bool
    warm: int
    in_place: bool
    standbys: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        kind = f"memory {self.memory}, shared {self.shared}, warm {self.warm}, in place {self.in_place}"
        kind += f", standbys {self.standbys}"
        return "\n".join([f"seed {self.seed}: {kind}", *map(str, self.steps)])


def make(seed: int) -> Schedule:
    rng = random.Random(seed)  # noqa: S311  # to be repeated, not to be secret
    steps: list[Step] = [Step(0.0, "plan", rng.getrandbits(20))]

    def at() -> float:
        return round(rng.uniform(0.0, SECONDS), 4)

    for _ in range(rng.choice((2, 4, 8))):  # crowds of callers
        begun, model = rng.uniform(0.4, SECONDS), rng.choice(MODELS)
        for _ in range(rng.choice((1, 3, 10))):
            time = round(begun + rng.expovariate(20.0), 4)
            within = round(rng.choice((rng.uniform(0.02, 0.2), rng.uniform(0.2, 2.0), rng.uniform(1.0, 8.0))), 3)
            how = f"{rng.choice((model, model, rng.choice(MODELS)))} {rng.choice(('small', 'small', 'large'))}"
            steps.append(Step(time, "request", rng.choice((1, 1, 1, 2, 3, 9, 20)), within, how))
    kinds: list[tuple[int, Callable[[], Step]]] = [
        (5, lambda: Step(at(), "batch", rng.randrange(DEVICES), round(rng.uniform(0.05, 4.0), 3), _one(BATCH_FAULTS))),
        (3, lambda: Step(at(), "start", rng.randrange(DEVICES), 0.0, _one(START_FAULTS))),
        (3, lambda: Step(_amid(), "kill", rng.randrange(8))),
        (1, lambda: Step(_amid(), "hang-up", rng.randrange(8))),
        (1, lambda: Step(_amid(), "unasked", rng.randrange(8), 0.0, _one(("answer", "ready", "garbage", "closed")))),
        (1, lambda: Step(at(), "system", rng.randint(1, 3), round(rng.uniform(0.1, 3.0), 3), _one(SYSTEM_FAULTS))),
        (2, lambda: Step(_amid(), "lose", rng.randrange(DEVICES), round(rng.uniform(0.1, 4.0), 3))),
        (1, lambda: Step(_amid(), "jump", 0, round(rng.choice((0.01, 0.5, 3.0, 30.0)) * rng.random(), 3))),
        (1, lambda: Step(at(), "full", 0, round(rng.uniform(0.1, 3.0), 3))),
        (3, lambda: Step(at(), "plan", rng.getrandbits(20))),
        (1, lambda: Step(at(), "unload", rng.randrange(len(MODELS)))),
        (1, lambda: Step(at(), "abort", rng.randrange(4))),
        (1, lambda: Step(at(), "revive", rng.randrange(len(MODELS)))),
        (3, lambda: Step(_amid(), "leave", rng.randrange(30))),
    ]

    def _amid() -> float:
        """A moment shortly after a request, when it is perhaps at work."""
        requests = [step for step in steps if step.what == "request"]
        return round(rng.choice(requests).time + rng.uniform(0.0, 0.1), 4)

    def _one(names: Sequence[str]) -> str:
        return rng.choice(names)

    weights = [weight for weight, _ in kinds]
    steps += [rng.choices(kinds, weights)[0][1]() for _ in range(rng.choice((2, 6, 12, 24)))]
    steps.sort(key=lambda step: step.time)
    memory, shared = rng.choice(list(MemoryPolicy)), rng.random() < 0.25
    return Schedule(
        seed=seed,
        memory=memory,
        shared=shared,
        warm=rng.choice((0, 0, 1)),
        in_place=rng.random() < 0.5,
        standbys=0 if shared else rng.choice((0, 1, 1, 2)),
        steps=tuple(steps),
    )


class _WithSteps(Protocol):
    @property
    def steps(self) -> tuple[Step, ...]: ...


_Schedule = TypeVar("_Schedule", bound=_WithSteps)


def shrink(schedule: _Schedule, fails: Callable[[_Schedule], bool], attempts: int = 120) -> _Schedule:
    """Return a schedule that still fails, and from which no step can be left out, as far as `attempts` runs tell."""
    size = len(schedule.steps) // 2
    while size and attempts > 0:
        start, before = 0, schedule
        while start < len(schedule.steps) and attempts > 0:
            fewer = msgspec.structs.replace(
                cast(Any, schedule), steps=schedule.steps[:start] + schedule.steps[start + size :]
            )
            attempts -= 1
            if fails(fewer):
                schedule = fewer
            else:
                start += size
        if schedule is before or size > len(schedule.steps):
            size = min(size, len(schedule.steps)) // 2 if size > 1 else 0
    return schedule


def describe_failure(schedule: _Schedule, problems_of: Callable[[_Schedule], Sequence[str]]) -> str:
    """Return what did not hold in a schedule, and the shortest one in which something does not; nothing where all
    holds. problems_of: plays a schedule."""
    problems = problems_of(schedule)
    if not problems:
        return ""
    short = shrink(schedule, lambda fewer: bool(problems_of(fewer)))
    return f"{problems[0]}\nThe shortest schedule that fails ({problems_of(short)[0]}):\n{short}"
