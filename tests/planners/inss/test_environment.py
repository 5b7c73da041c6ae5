"""InSS' decision process: states, rewards of equation 3, and queueing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.inss.cluster import Cluster, adjusted
from cotenant.planners.inss.environment import PENALTY, RATE_EVERY, Environment
from cotenant.planners.inss.gym_environment import ProvisioningEnv
from tests.planners.inss.cases import two_devices
from tests.planners.problems import MIB, problems

APART = np.array([[0, 9], [1, 9]])
TOGETHER = np.array([[0, 4], [0, 4]])


def environment(**options: object) -> Environment:
    problem = two_devices(**options)  # type: ignore[arg-type]
    rates = list(problem.rates.values())
    return Environment(Cluster.of(problem), rates, rates)


@pytest.mark.filterwarnings(
    "ignore:.*Box observation space.*:UserWarning", "ignore:.*not within the range.*:UserWarning"
)
def test_environment_passes_the_check_of_gymnasium() -> None:
    check_env(ProvisioningEnv(two_devices(), [10.0, 10.0], [100.0, 50.0], steps=5), skip_render_check=True)


def test_episode_is_truncated_after_its_steps() -> None:
    made = ProvisioningEnv(two_devices(), [10.0, 10.0], [100.0, 50.0], steps=3)
    made.reset(seed=1)
    ends = [made.step(made.action_space.sample())[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_reward_without_violations_is_the_normalised_throughput() -> None:
    """Equation 3. Models that have a device each run the batches that equation 2 allows within 100 ms."""
    made = environment()
    made.at([100.0, 50.0])
    _, reward, outcome = made.step(APART)
    assert outcome.violated == (0.0, 0.0)
    assert outcome.throughput == pytest.approx([b / (0.002 + 0.001 * b) for b in outcome.decision.batches])
    assert reward == pytest.approx(sum(outcome.throughput) * 0.003)


def test_model_that_memory_leaves_out_violates_all_its_targets() -> None:
    """Constraint 1b: two models of 4 MiB do not fit into 7 MiB."""
    made = environment(memory=7 * MIB)
    made.at([100.0, 50.0])
    state, reward, outcome = made.step(TOGETHER)
    assert outcome.violated == (0.0, 1.0) and outcome.throughput[1] == 0.0
    assert reward == pytest.approx(outcome.throughput[0] * 0.003 - PENALTY)
    assert state[:2] == pytest.approx([4 / 7, 0.0])


def test_state_has_memory_rates_and_queues_each_over_its_largest() -> None:
    made = Environment(Cluster.of(two_devices(memory=8 * MIB)), [10.0, 10.0], [100.0, 50.0])
    assert made.at([50.0, 10.0]) == pytest.approx([0, 0, 0.5, 0.2, 0, 0])
    state, _, outcome = made.step(APART)
    assert state[:4] == pytest.approx([0.5, 0.5, 0.5, 0.2])
    waiting = np.round(state[4:] * [100.0, 50.0])
    assert (waiting < outcome.decision.batches).all() and waiting.any()


def simulated(rate: float, batch: int, seconds: float, slo: float, steps: int) -> tuple[int, int]:
    """Serve evenly spaced requests one at a time: the answered, and those that miss the target."""
    waiting: list[float] = []
    free, answered, missed = 0.0, 0, 0
    for n in range(int(rate * steps)):
        waiting.append((n + 1) / rate)
        if len(waiting) == batch:
            free = max(free, waiting[-1]) + seconds
            answered += batch
            missed += sum(free - arrival > slo * (1 + 1e-9) for arrival in waiting)
            waiting = []
    return answered, missed


@pytest.mark.parametrize(("rate", "batch", "seconds"), [(100.0, 8, 0.02), (97.0, 3, 0.01), (300.0, 4, 0.012)])
def test_queueing_agrees_with_serving_one_request_after_the_other(rate: float, batch: int, seconds: float) -> None:
    slo = 0.085
    made = Environment(Cluster.of(two_devices(rates=(rate,), slo=slo)), [rate], [rate])
    late = [made._serve(0, made._arrivals(0), batch, seconds) for _ in range(20)]
    answered, missed = simulated(rate, batch, seconds, slo, 20)
    assert np.mean(late) == pytest.approx(missed / answered, abs=0.01)


def test_overload_is_late_and_the_queue_stays_bounded() -> None:
    made = environment(rates=(3000.0, 50.0))
    made.at([3000.0, 50.0])
    for _ in range(5):
        state, _, outcome = made.step(APART)
    assert outcome.violated[0] > 0.5
    assert state[4] * 3000.0 <= 0.1 * 3000.0 + 1


def test_rates_turn_at_the_ends_of_their_range() -> None:
    made = Environment(Cluster.of(two_devices()), [0.0, 0.0], [100.0, 50.0])
    made.reset(np.random.default_rng(3))
    seen = []
    for _ in range(60 * RATE_EVERY):
        made.step(APART)
        seen.append(made.rates.copy())
    rates = np.array(seen)
    assert rates.min() >= 0.0 and rates.max(axis=0) == pytest.approx([100.0, 50.0])
    steps = np.abs(np.diff(rates[RATE_EVERY - 1 :: RATE_EVERY], axis=0))
    assert steps.max(axis=0) == pytest.approx([5.0, 2.5])


def test_equal_seeds_give_equal_episodes() -> None:
    made = environment()
    once, again = (made.reset(np.random.default_rng(5)) for _ in range(2))
    assert (once == again).all()


@given(problem=problems(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_adjusted_shares_fit_every_device_and_leave_none_idle(problem: Problem, data: st.DataObject) -> None:
    cluster = Cluster.of(problem)
    if not cluster.devices:
        return
    choice = st.tuples(st.integers(0, len(cluster.devices) - 1), st.integers(0, cluster.shares - 1))
    models = len(cluster.models)
    choices = np.array(data.draw(st.lists(choice, min_size=models, max_size=models)))
    where = adjusted(cluster, choices, [True] * models)
    for n, kind in enumerate(cluster.devices):
        shares = [where.shares[i] for i in where.on(n)]
        assert sum(shares) <= 1000 and all(share in kind.cuts for share in shares)
        assert len(shares) <= (kind.max_partitions or models)
        if shares:
            larger = [min((cut for cut in kind.cuts if cut > share), default=9999) - share for share in shares]
            assert sum(shares) + min(larger) > 1000


def test_environment_without_devices_or_with_wrong_rates_is_an_error() -> None:
    problem = two_devices()
    bare = msgspec.structs.replace(problem, fleet=())
    with pytest.raises(PlanError, match=r"^an environment needs at least one device and one model"):
        Environment(Cluster.of(bare), [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(PlanError, match=r"^model 'b': rates from 2 to 1 requests/s are no range$"):
        Environment(Cluster.of(problem), [1.0, 2.0], [1.0, 1.0])
