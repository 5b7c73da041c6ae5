from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.application import Application, Choice, Fanout, Fixed, Poisson, Stage
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.applications import Applications, application_specs, fixed_fanout
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    ApplicationSpec,
    Applied,
    Arrived,
    Cancelled,
    Command,
    Died,
    Event,
    Failed,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Run,
    Spawn,
    WakeAt,
    Woke,
)

# One lane for each model, 10 ms a batch of up to four.
LANES = tuple(
    LaneSpec(id=LaneId(DeviceId("cpu"), n), models=(LaneModel(model=name, latencies=(0.01,) * 4),))
    for n, name in enumerate("abc")
)
DIAMOND = Application(
    name="diamond",
    slo=0.1,
    stages=(
        Stage(name="first", model="a"),
        Stage(name="left", model="b", after=("first",), fanout=Fixed(2)),
        Stage(name="right", model="c", after=("first",)),
        Stage(name="last", model="a", after=("left", "right")),
    ),
)
SPLIT = {"diamond": {"first": 0.03, "left": 0.04, "right": 0.04, "last": 0.03}}


class Site:
    """A machine whose lanes are up; told of batches that end, it remembers all that it answered."""

    def __init__(self, *applications: Application) -> None:
        self.dispatcher = Dispatcher()
        split = {app.name: SPLIT.get(app.name, dict.fromkeys(app.visits, 0.02)) for app in applications}
        self.machine = Applications(self.dispatcher.handle)
        self.said: list[Command] = []
        self.tell(Applied(LANES, application_specs(applications, split)), 0.0)
        for lane in LANES:
            self.tell(Ready(lane.id), 0.0)

    def tell(self, event: Event, now: float) -> list[Command]:
        commands = self.machine.handle(event, now)
        self.machine.invariants()
        self.dispatcher.invariants()
        self.said += commands
        return commands

    def finish(self, model: str, now: float, made: Mapping[int, int] = MappingProxyType({})) -> list[Command]:
        """made: by number of a later stage, how many requests of it each answer makes."""
        lane = LaneId(DeviceId("cpu"), "abc".index(model))
        batch = self.dispatcher.lanes[lane].batch
        assert batch is not None
        counts = tuple((it.id, stage, count) for it in batch.requests for stage, count in made.items())
        return self.tell(Finished(lane, batch.id, made=counts), now)

    def outcomes(self, id_: int = 1) -> list[tuple[Outcome, str]]:
        replies = [command for command in self.said if isinstance(command, Reply)]
        return [(reply.outcome, reply.reason) for reply in replies for it in reply.requests if it.id == id_]


def spawned(commands: Sequence[Command]) -> list[tuple[str, float]]:
    return [(it.request.model, round(it.request.deadline, 9)) for it in commands if isinstance(it, Spawn)]


def request(id_: int = 1, deadline: float = 0.1, model: str = "diamond", arrived: float = 0.0) -> Request:
    return Request(id_, model, arrived, arrived + deadline)


def test_application_request_passes_all_stages_and_is_served_once() -> None:
    site = Site(DIAMOND)
    assert spawned(site.tell(Arrived(request()), 0.0)) == [("a", 0.03)]
    assert spawned(site.finish("a", 0.01)) == [("b", 0.07)] * 2 + [("c", 0.07)]
    assert spawned(site.finish("c", 0.02)) == []
    assert spawned(site.finish("b", 0.02)) == [], "the second of two runs behind the first"
    assert spawned(site.finish("b", 0.03)) == [("a", 0.1)]
    assert site.outcomes() == []
    site.finish("a", 0.04)
    assert site.outcomes() == [(Outcome.SERVED, "")]


def test_spawn_command_precedes_others_of_its_request() -> None:
    site = Site(DIAMOND)
    site.tell(Arrived(request()), 0.0)
    for model, now in (("a", 0.01), ("c", 0.02), ("b", 0.02), ("b", 0.03), ("a", 0.04)):
        site.finish(model, now)
    known = {1}
    for command in site.said:
        match command:
            case Spawn(whole, _, part):
                assert whole in known
                known.add(part.id)
            case Run() | Reply():
                assert known >= {part.id for part in command.requests}


def test_application_shorter_timeout_shortens_every_stage() -> None:
    site = Site(DIAMOND)
    assert spawned(site.tell(Arrived(request(deadline=0.05)), 0.0)) == [("a", 0.015)]


def test_application_longer_timeout_extends_the_last_stages() -> None:
    site = Site(DIAMOND)
    assert spawned(site.tell(Arrived(request(deadline=0.3)), 0.0)) == [("a", 0.23)]


def test_application_failed_stage_ends_it_and_cancels_siblings() -> None:
    site = Site(DIAMOND)
    site.tell(Arrived(request()), 0.0)
    site.finish("a", 0.01)
    batch = site.dispatcher.lanes[LaneId.parse("cpu-0/2")].batch
    assert batch is not None
    site.tell(Failed(LaneId.parse("cpu-0/2"), batch.id, "no such class"), 0.02)
    assert site.outcomes() == [(Outcome.FAILED, "right: no such class")]
    assert sorted(outcome.value for part in (-2, -3) for outcome, _ in site.outcomes(part)) == [
        "cancelled",
        "cancelled",
    ]
    site.finish("b", 0.03)
    assert len(site.outcomes()) == 1


def test_application_that_cannot_meet_its_deadline_is_rejected() -> None:
    site = Site(DIAMOND)
    site.tell(Arrived(request(deadline=0.02)), 0.0)
    assert site.outcomes() == [(Outcome.REJECTED, "first: it could not be answered within its deadline")]


def test_application_that_can_no_longer_finish_expires() -> None:
    site = Site(DIAMOND)
    site.tell(Arrived(request()), 0.0)
    site.finish("a", 0.065)
    assert site.outcomes() == [(Outcome.EXPIRED, "left: it could not be answered within its deadline")]


def test_application_cancelled_by_the_caller_cancels_all_stages() -> None:
    site = Site(DIAMOND)
    site.tell(Arrived(request()), 0.0)
    site.finish("a", 0.01)
    site.tell(Cancelled(1), 0.012)
    assert site.outcomes() == [(Outcome.CANCELLED, "the caller left")]
    site.tell(Cancelled(1), 0.013)
    assert len(site.outcomes()) == 1


def test_model_requests_pass_through() -> None:
    site, alone = Site(DIAMOND), Dispatcher()
    alone.handle(Applied(LANES), 0.0)
    for lane in LANES:
        alone.handle(Ready(lane.id), 0.0)
    plain = Arrived(request(7, model="b"))
    assert site.tell(plain, 0.0) == alone.handle(plain, 0.0)


COUNTED = Application(
    name="street",
    slo=0.1,
    stages=(
        Stage(name="find", model="a"),
        Stage(name="cars", model="b", after=("find",), fanout=Poisson(2.0), counted=True),
        Stage(name="faces", model="c", after=("find",), fanout=Poisson(1.0), counted=True),
    ),
)


def test_counted_stage_sends_as_many_requests_as_the_response_says() -> None:
    site = Site(COUNTED)
    site.tell(Arrived(request(model="street")), 0.0)
    commands = site.finish("a", 0.01, {1: 3, 2: 0})
    assert [(it.stage, it.item) for it in commands if isinstance(it, Spawn)] == [(1, 0), (1, 1), (1, 2)]
    site.finish("b", 0.02)
    assert site.outcomes() == []
    site.finish("b", 0.03)
    assert site.outcomes() == [(Outcome.SERVED, "")]
    site.tell(Arrived(request(2, model="street", arrived=1.0)), 1.0)
    site.finish("a", 1.01, {1: 0, 2: 0})
    assert site.outcomes(2) == [(Outcome.SERVED, "")], "nothing was found"


def test_count_that_arrives_too_late_is_ignored() -> None:
    site = Site(COUNTED)
    site.tell(Arrived(request(model="street")), 0.0)
    site.tell(Cancelled(1), 0.005)
    assert (
        spawned(site.finish("a", 0.01, {1: 3, 2: 1}) if site.dispatcher.lanes[LaneId.parse("cpu-0/0")].batch else [])
        == []
    )
    site.tell(Arrived(request(2, model="street", arrived=1.0)), 1.0)
    assert len(spawned(site.finish("a", 1.01, {1: 1, 2: 1}))) == 2


def test_stages_that_get_no_request_are_not_awaited() -> None:
    rare = Application(
        name="rare",
        slo=0.1,
        stages=(
            Stage(name="first", model="a"),
            Stage(name="then", model="b", after=("first",), fanout=Choice((0, 1), (0.5, 0.5))),
            Stage(name="last", model="c", after=("first", "then")),
        ),
    )
    site = Site()
    specs = application_specs([rare], {"rare": {"first": 0.03, "then": 0.03, "last": 0.03}})
    site.machine = Applications(site.dispatcher.handle, lambda spec, n, times: [0 if n == 1 else 1] * times, specs)
    site.tell(Arrived(request(model="rare")), 0.0)
    assert spawned(site.finish("a", 0.01)) == [("c", 0.1)]
    site.finish("c", 0.02)
    assert site.outcomes() == [(Outcome.SERVED, "")]


@st.composite
def graphs(draw: st.DrawFn) -> Application:
    """Any graph over the three models; each stage is reached."""
    stages: list[Stage] = []
    for n in range(draw(st.integers(1, 5))):
        before = [stage.name for stage in stages]
        after = draw(st.lists(st.sampled_from(before), unique=True, max_size=3)) if before else []
        fanouts: tuple[Fanout, ...] = (Fixed(1), Fixed(1), Fixed(2), Choice((0, 1, 3), (0.5, 0.25, 0.25)))
        fanout = draw(st.sampled_from(fanouts))
        stages.append(Stage(name=f"s{n}", model=draw(st.sampled_from("abc")), after=tuple(after), fanout=fanout))
    return Application(name="app", slo=0.2, stages=tuple(stages))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), graph=graphs())
def test_application_requests_over_random_events_end_exactly_once(data: st.DataObject, graph: Application) -> None:
    site = Site(graph)

    def fanned(spec: ApplicationSpec, number: int, times: int) -> Sequence[int] | None:
        fanout = spec.stages[number].fanout
        if isinstance(fanout, Fixed):
            return fixed_fanout(spec, number, times)
        return [data.draw(st.sampled_from((0, 1, 3))) for _ in range(times)]

    seconds = dict.fromkeys(graph.visits, 0.2 / 5)
    site.machine = Applications(site.dispatcher.handle, fanned, application_specs([graph], {"app": seconds}))
    now, wanted = 0.0, set()
    wakes: list[WakeAt] = []

    def tell(event: Event) -> None:
        wakes.extend(command for command in site.tell(event, now) if isinstance(command, WakeAt))

    for number in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.sampled_from((0.0, 0.001, 0.01, 0.05)))
        running = [lane for lane in site.dispatcher.lanes.values() if lane.batch is not None]
        match data.draw(st.sampled_from(("arrive", "arrive", "finish", "finish", "cancel", "fail", "die", "plain"))):
            case "arrive" | "plain" as kind:
                name = "app" if kind == "arrive" else data.draw(st.sampled_from("abc"))
                wanted.add(number)
                tell(Arrived(request(number, data.draw(st.sampled_from((0.01, 0.1, 0.2, 1.0))), name, now)))
            case "cancel":
                tell(Cancelled(data.draw(st.integers(0, 12))))
            case verb if running:
                lane = data.draw(st.sampled_from(running))
                assert lane.batch is not None
                if verb == "die":
                    tell(Died(lane.id, "gone"))
                    tell(Ready(lane.id))
                else:
                    tell(Finished(lane.id, lane.batch.id) if verb == "finish" else Failed(lane.id, lane.batch.id, "no"))
    for _ in range(2_000):
        running = [lane for lane in site.dispatcher.lanes.values() if lane.batch is not None]
        if not running:
            break
        now += 0.01
        for wake in [wake for wake in wakes if wake.time <= now]:
            wakes.remove(wake)
            tell(Woke(wake.lane, wake.time))
        for lane in running:
            if lane.batch is not None:
                tell(Finished(lane.id, lane.batch.id))
    now += 10
    for wake in wakes[:]:
        tell(Woke(wake.lane, wake.time))
    replies = [command for command in site.said if isinstance(command, Reply)]
    ends = Counter(part.id for reply in replies for part in reply.requests)
    spawns = {command.request.id for command in site.said if isinstance(command, Spawn)}
    assert ends == Counter(wanted | spawns)
