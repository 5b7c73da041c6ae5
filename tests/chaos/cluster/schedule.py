"""What happens to front ends, nodes and the network between them, and when: made from a seed, and printed where it
fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from cotenant.control.revision import MemoryPolicy
from tests.chaos.schedule import BATCH_FAULTS, MODELS, START_FAULTS, Step

SECONDS = 6.0  # within which everything happens
NODES = ("node-a", "node-b")
NET_FAULTS = ("cut", "hole", "hole-to", "hole-from", "lag")
NODE_FAULTS = ("crash", "vanish", "freeze", "upgrade")
FRONT_END_FAULTS = ("crash", "vanish", "freeze", "lives")


LAGS = (0.01, 0.05, 0.25)  # seconds more, one way


class Schedule(msgspec.Struct, frozen=True):
    """A run. shared: lanes of a device share a process. warm: pre-started workers of each node. standbys: standby
    workers of each device. in_place: shares change without a new worker. narrow: links buffer little. steps: in order
    of time."""

    seed: int
    memory: MemoryPolicy
    shared: bool
    warm: int
    standbys: int
    in_place: bool
    narrow: bool
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        kind = f"memory {self.memory}, shared {self.shared}, warm {self.warm}, standbys {self.standbys}"
        kind += f", in place {self.in_place}, narrow {self.narrow}"
        return "\n".join([f"seed {self.seed}: {kind}", *map(str, self.steps)])


def make(seed: int) -> Schedule:
    rng = random.Random(seed)  # noqa: S311  # to be repeated, not to be secret
    steps: list[Step] = [Step(0.0, "plan", rng.getrandbits(20))]

    def at() -> float:
        return round(rng.uniform(0.0, SECONDS), 4)

    for _ in range(rng.choice((2, 4, 8))):  # crowds of callers
        begun, model = rng.uniform(0.8, SECONDS), rng.choice(MODELS)
        for _ in range(rng.choice((1, 3, 10))):
            time = round(begun + rng.expovariate(20.0), 4)
            within = round(rng.choice((rng.uniform(0.02, 0.2), rng.uniform(0.2, 2.0), rng.uniform(1.0, 8.0))), 3)
            how = f"{rng.choice((model, model, rng.choice(MODELS)))} {rng.choice(('small', 'small', 'large'))}"
            steps.append(Step(time, "request", rng.choice((1, 1, 1, 2, 3, 9, 20)), within, how))

    def node() -> int:
        return rng.randrange(len(LAGS) * len(NODES))

    kinds: list[tuple[int, Callable[[], Step]]] = [
        (6, lambda: Step(_amid(), "net", node(), _time(), _one(NET_FAULTS))),
        (4, lambda: Step(_amid(), "node", node(), _time(), _one(NODE_FAULTS))),
        (2, lambda: Step(_amid(), "takeover", rng.randint(0, 2), _time(), _one(FRONT_END_FAULTS))),
        (2, lambda: Step(at(), "batch", node(), round(rng.uniform(0.05, 4.0), 3), _one(BATCH_FAULTS))),
        (1, lambda: Step(at(), "start", node(), 0.0, _one(START_FAULTS))),
        (1, lambda: Step(_amid(), "kill", rng.randrange(8))),
        (1, lambda: Step(_amid(), "lose", node(), _time())),
        (1, lambda: Step(at(), "dismiss", node(), _time())),
        (2, lambda: Step(at(), "plan", rng.getrandbits(20))),
        (1, lambda: Step(at(), "unload", rng.randrange(len(MODELS)))),
        (2, lambda: Step(_amid(), "leave", rng.randrange(30))),
    ]

    def _amid() -> float:
        """A moment shortly after a request, when it is perhaps at work, or after a plan, when lanes come and go."""
        if rng.random() < 0.2:
            return round(rng.choice([step for step in steps if step.what == "plan"]).time + rng.uniform(0.0, 1.0), 4)
        requests = [step for step in steps if step.what == "request"]
        return round(rng.choice(requests).time + rng.uniform(0.0, 0.1), 4)

    def _time() -> float:
        """How long it lasts: shorter and longer than a link may be silent."""
        return round(rng.choice((0.05, 0.6, 1.0, 3.0)) * (0.2 + rng.random()), 3)

    def _one(names: Sequence[str]) -> str:
        return rng.choice(names)

    weights = [weight for weight, _ in kinds]
    steps += [rng.choices(kinds, weights)[0][1]() for _ in range(rng.choice((1, 3, 6, 12)))]
    steps.sort(key=lambda step: step.time)
    shared = rng.random() < 0.25
    return Schedule(
        seed=seed,
        memory=rng.choice(list(MemoryPolicy)),
        shared=shared,
        warm=rng.choice((0, 0, 1)),
        standbys=0 if shared else rng.choice((0, 1)),
        in_place=rng.random() < 0.5,
        narrow=rng.random() < 0.25,
        steps=tuple(steps),
    )
