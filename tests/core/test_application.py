import numpy as np
import pytest

from cotenant.core.application import Application, Choice, Fixed, Poisson, Stage
from cotenant.errors import PlanError

TRAFFIC = Application(
    name="traffic",
    slo=0.2,
    stages=(
        Stage(name="cars", model="recogniser", after=("find",), fanout=Poisson(1.5)),
        Stage(name="find", model="detector"),
        Stage(name="people", model="recogniser", after=("find",), fanout=Choice((0, 4), (0.75, 0.25))),
        Stage(name="sum", model="summary", after=("cars", "people"), fanout=Fixed(2)),
    ),
)


def test_visits_multiply_fan_outs_along_the_graph() -> None:
    assert TRAFFIC.visits == {"find": 1.0, "cars": 1.5, "people": 1.0, "sum": 2.0}
    assert TRAFFIC.uses("recogniser") == 2.5
    assert [stage.name for stage in TRAFFIC.order] == ["find", "cars", "people", "sum"]


def test_finish_times_and_remainder_follow_longest_paths() -> None:
    seconds = {"find": 0.1, "cars": 0.2, "people": 0.5, "sum": 0.25}
    assert TRAFFIC.finish_times(seconds) == pytest.approx({"find": 0.1, "cars": 0.3, "people": 0.6, "sum": 0.85})
    assert TRAFFIC.remainder(seconds) == pytest.approx({"find": 0.75, "cars": 0.25, "people": 0.25, "sum": 0.0})
    assert TRAFFIC.length(seconds) == pytest.approx(0.85)


def test_success_equals_frequency_in_random_draws() -> None:
    each = {"detector": 0.95, "recogniser": 0.9, "summary": 0.99}
    rng = np.random.default_rng(0)
    times = 200_000
    parts = [
        np.full(times, 1),
        Poisson(1.5).draw(rng, times),
        Choice((0, 4), (0.75, 0.25)).draw(rng, times),
        np.full(times, 2),
    ]
    chances = (0.95, 0.9, 0.9, 0.99)
    whole = np.prod([chance**count for chance, count in zip(chances, parts, strict=True)], axis=0).mean()
    assert TRAFFIC.success(each) == pytest.approx(whole, abs=0.003)


@pytest.mark.parametrize("fanout", [Fixed(3), Poisson(2.5), Choice((0, 1, 7), (0.5, 0.25, 0.25))])
def test_fanout_draws_match_mean_and_generating_function(fanout: Fixed | Poisson | Choice) -> None:
    drawn = fanout.draw(np.random.default_rng(1), 100_000)
    assert drawn.mean() == pytest.approx(fanout.mean, rel=0.02)
    assert (0.8**drawn).mean() == pytest.approx(fanout.all_succeed(0.8), rel=0.02)


def test_burst_counts_requests_sent_together() -> None:
    """Size-biased: one of a Poisson number sees the mean besides itself; of a choice, larger groups more often."""
    assert TRAFFIC.burst("recogniser") == 5.5, "four of the second stage, and one and a half of the first"
    assert (TRAFFIC.burst("detector"), TRAFFIC.burst("summary"), TRAFFIC.burst("other")) == (1.0, 2.0, 0.0)
    drawn = Poisson(2.5).draw(np.random.default_rng(2), 100_000)
    assert np.repeat(drawn, drawn).mean() == pytest.approx(Poisson(2.5).burst, rel=0.02)


def test_visits_after_a_fan_out_multiply() -> None:
    deep = Application(
        name="deep",
        slo=1.0,
        stages=(
            Stage(name="a", model="m", fanout=Fixed(2)),
            Stage(name="b", model="m", after=("a",), fanout=Fixed(3)),
            Stage(name="c", model="m", after=("b",), fanout=Poisson(0.5)),
        ),
    )
    assert deep.visits == {"a": 2.0, "b": 6.0, "c": 3.0}
    assert deep.success({"m": 1.0}) == 1.0
    assert deep.burst("m") == 3.0, "stages one after another make no requests together"


ROUND = (
    Stage(name="a", model="m", after=("c",)),
    Stage(name="b", model="m", after=("a",)),
    Stage(name="c", model="m", after=("b",)),
)
NEVER = (Stage(name="a", model="m", fanout=Fixed(0)), Stage(name="b", model="m", after=("a",)))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "no stages; give at least one, with its model"),
        ((Stage(name="a", model="m"),) * 2, "stage 'a' is listed twice; give each a name of its own"),
        ((Stage(name="a", model="m", after=("b",)),), "stage 'a' follows 'b', which is not one of its stages a"),
        (ROUND, "its stages form a cycle: "),
        ((Stage(name="a", model="m", after=("a",)),), "its stages form a cycle: a after a"),
        (NEVER, "stage 'a' is never reached, as fan-outs before it or its own are 0"),
        ((Stage(name="a", model="m", fanout=Fixed(-1)),), "stage 'a': a fan-out of -1 must be 0 to 10000"),
        (
            (Stage(name="a", model="m", fanout=Poisson(float("nan"))),),
            "stage 'a': a fan-out of nan on average must be 0 to 10000",
        ),
        (
            (Stage(name="a", model="m", fanout=Choice((0, 1), (0.5, 0.6))),),
            "stage 'a': the chances 0.5, 0.6 do not add up to 1",
        ),
        (
            (Stage(name="a", model="m", fanout=Choice((0, 1), (1.0,))),),
            "stage 'a': 2 fan-outs with 1 chances; give each its own",
        ),
        (
            (Stage(name="a", model="m", fanout=Fixed(200)), Stage(name="b", model="m", after=("a",), fanout=Fixed(51))),
            "stage 'b' gets 10200 requests for each; at most 10000 make sense",
        ),
    ],
)
def test_application_with_invalid_graph_raises_plan_error(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Application(name="app", slo=1.0, stages=stages)
    assert str(caught.value).startswith(f"application 'app': {message}")


@pytest.mark.parametrize("slo", [0.0, -1.0, float("inf"), float("nan")])
def test_application_with_invalid_slo_raises_plan_error(slo: float) -> None:
    with pytest.raises(PlanError, match="must be above 0 and finite"):
        Application(name="app", slo=slo, stages=(Stage(name="a", model="m"),))
