from __future__ import annotations

import numpy as np
import pytest

from cotenant.live.jobs.pressure import FIRST, SETTLED, PressureWatch, ServingCounts

LOOK = 0.05


class World:
    """Poisson arrivals, seen every LOOK seconds."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.watch = PressureWatch()
        self.rate = rate
        self.now = 0.0
        self.arrived = 0
        self.waiting: dict[str, tuple[int, float]] = {}
        self._random = np.random.default_rng(seed)

    def run(self, seconds: float) -> list[float]:
        """Return the moments at which there was pressure."""
        seen = []
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            self.arrived += int(self._random.poisson(self.rate * LOOK))
            counts = ServingCounts(arrived=self.arrived, ended=self.arrived, missed=0, waiting=self.waiting)
            if self.watch.observe(counts, self.now):
                seen.append(self.now)
        return seen


@pytest.mark.parametrize(("rate", "within"), [(80, 0.2), (400, 0.05), (4000, 0.05)])
def test_doubled_rate_is_seen_soon_however_chance_has_it(rate: float, within: float) -> None:
    """The median of seeds; a test cannot know sooner than the counts tell."""
    delays = []
    for seed in range(20):
        world = World(rate, seed)
        world.run(20.0)
        begun, world.rate = world.now, 2 * rate
        delays.append(next(iter(world.run(5.0)), 99.0) - begun)
    assert np.median(delays) <= within + 1e-9
    assert max(delays) < 3.0


def test_steady_rate_gives_no_pressure_most_of_the_time() -> None:
    looks = sum(len(World(80, seed).run(100.0)) for seed in range(10))
    assert looks < 0.03 * 10 * 100 / LOOK


@pytest.mark.parametrize("times", [2, 10])
def test_rate_that_stays_up_becomes_usual_once_serving_has_done_well_at_it(times: float) -> None:
    world = World(80)
    world.run(20.0)
    begun, world.rate = world.now, 80.0 * times
    seen = world.run(30.0)
    assert seen[0] < begun + 1.0
    assert sum(moment < begun + SETTLED + 1.0 for moment in seen) > 1.5 / LOOK
    assert sum(moment >= begun + SETTLED + 1.0 for moment in seen) < 0.03 * 30 / LOOK


def test_step_lasts_while_a_queue_grows() -> None:
    world = World(80)
    world.run(20.0)
    world.rate = 160.0
    world.waiting = {"digits": (50, 9.0)}
    assert len(world.run(10.0)) == 10 / LOOK
    world.waiting = {}
    seen = world.run(10.0)
    assert 0 < len(seen) <= 1.5 * SETTLED / LOOK


def test_few_requests_after_a_pause_are_no_step() -> None:
    world = World(0)
    world.run(60.0)
    world.rate = 4.0
    assert len(world.run(60.0)) < 0.03 * 60 / LOOK


def test_nothing_is_said_of_rates_before_they_are_known() -> None:
    world = World(1000)
    assert not world.run(FIRST - LOOK)


def observed(**second: object) -> str:
    watch = PressureWatch()
    watch.observe(ServingCounts(arrived=0, ended=1000, missed=5), 1.0)
    found = watch.observe(ServingCounts(**{"arrived": 0, "ended": 1000, "missed": 5} | second), 1.1)  # type: ignore[arg-type]
    return "" if found is None else f"{found.model}: {found.reason}"


def test_rollout_is_pressure_on_all_devices() -> None:
    assert observed(changing=True) == ": a rollout is in progress"


def test_queue_of_three_batches_is_pressure_on_the_devices_of_its_model() -> None:
    assert observed(waiting={"digits": (12, 3.0)}) == "digits: 12 requests wait for digits"
    assert not observed(waiting={"digits": (12, 2.9)})
    assert not observed(waiting={"digits": (3, 3.0)})  # a few of a model that runs one at a time are no queue


def test_more_misses_than_the_slo_allows_are_pressure() -> None:
    assert observed(ended=1100, missed=7) == ": 2 of 100 requests missed their target in the last 5 s"
    assert not observed(ended=1300, missed=7)
    assert not observed(ended=1001, missed=6)


def test_misses_are_forgotten() -> None:
    watch = PressureWatch()
    watch.observe(ServingCounts(arrived=0, ended=0, missed=0), 0.0)
    assert watch.observe(ServingCounts(arrived=0, ended=100, missed=9), 1.0)
    assert watch.observe(ServingCounts(arrived=0, ended=200, missed=9), 4.0)
    assert not watch.observe(ServingCounts(arrived=0, ended=300, missed=9), 6.5)
