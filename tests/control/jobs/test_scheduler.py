"""A job's life, rule by rule."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.control.jobs.events import (
    DeviceIdle,
    ForgetJob,
    GrantShare,
    JobCancelAsked,
    JobExited,
    JobInterfered,
    JobPauseAsked,
    JobPlaced,
    JobProgressed,
    JobRefused,
    JobResumeAsked,
    JobsRestored,
    JobsShutdown,
    KillJob,
    ModelsChanged,
    PlaceJob,
    PressureSeen,
    StartJob,
    TellStop,
)
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, JobInterference, JobState
from cotenant.errors import ConfigError
from tests.control.jobs.world import CPU, World, job

OTHER = DeviceId("cpu", 1)
MIB = 1 << 20


def running(**values: Any) -> World:
    world = World(devices={CPU: DeviceIdle(600, memory=8 << 30)})
    world.submit(job(**values))
    assert world.status().state is JobState.RUNNING
    return world


# Starts


def test_job_is_placed_started_and_given_what_is_idle() -> None:
    world = World(devices={CPU: DeviceIdle(600)})
    submitted = job()
    assert world.submit(submitted) == [
        PlaceJob(submitted, {CPU: ()}),
        StartJob(submitted, CPU, 1),
        GrantShare("job-1", 1, 600),
    ]
    status = world.status()
    assert (status.state, status.reason, status.device, status.attempt) == (JobState.RUNNING, "", CPU, 1)
    assert status.started_at == status.submitted_at == 1000.0


def test_id_that_is_there_is_refused() -> None:
    world = running()
    with pytest.raises(ConfigError, match=r"^id: there is a job 'job-1' already; submit it under another id$"):
        world.submit(job())
    world.exit(completed=True)
    with pytest.raises(ConfigError, match="there is a job 'job-1' already"):
        world.submit(job())


def test_job_waits_until_enough_is_idle() -> None:
    world = World(devices={CPU: DeviceIdle(19)})
    assert world.submit(job()) == []
    assert world.status().reason == "waits for idle share: less than 2 % of cpu-0 is idle"
    world.observe(20)
    assert world.status().state is JobState.RUNNING


def test_job_waits_where_no_device_takes_jobs() -> None:
    world = World(devices={})
    world.submit(job())
    assert world.status().reason == "waits for a device: none takes jobs now"
    world.devices = {OTHER: DeviceIdle(100)}
    world.observe()
    assert world.status().device == OTHER


def test_job_waits_for_the_memory_that_it_needs() -> None:
    world = World(devices={CPU: DeviceIdle(500, memory=3 * MIB)})
    world.submit(job("job-1", memory=2 * MIB), job("job-2", memory=2 * MIB))
    assert world.status("job-1").state is JobState.RUNNING
    assert world.status("job-2").reason == "waits for memory: it needs 2 MiB, and 1 MiB are free on cpu-0"
    world.exit("job-1", completed=True)
    assert world.status("job-2").state is JobState.RUNNING


def test_job_without_a_limit_is_counted_with_that_of_the_options() -> None:
    world = World(devices={CPU: DeviceIdle(500, memory=3 * MIB)}, memory=2 * MIB)
    world.submit(job("job-1"), job("job-2"))
    assert [world.status(each).state for each in ("job-1", "job-2")] == [JobState.RUNNING, JobState.QUEUED]


def test_job_waits_for_its_turn_where_as_many_run_as_may() -> None:
    world = World(slots=2)
    world.submit(*(job(f"job-{number}") for number in range(3)))
    assert world.status("job-2").reason == "waits for its turn: 2 jobs on cpu-0, which are the most at once"
    world.exit("job-0", completed=True)
    assert world.status("job-2").state is JobState.RUNNING


def test_who_has_waited_longest_by_priority_is_next() -> None:
    world = World(slots=1)
    world.submit(job("first"))
    world.submit(job("low"))
    world.until(world.now + 100)
    world.submit(job("high", priority=2))
    # 160 s at 1 against 60 s at 2: the one of low priority has waited for long enough.
    world.exit("first", completed=True)
    assert world.status("low").state is JobState.RUNNING
    world.submit(job("later", priority=1))
    world.exit("low", completed=True)
    assert world.status("high").state is JobState.RUNNING


def test_only_devices_with_room_are_offered_and_one_job_is_placed_after_the_other() -> None:
    world = World(devices={CPU: DeviceIdle(5), OTHER: DeviceIdle(500)})
    world.places = False
    first, second = job("job-1"), job("job-2")
    assert world.submit(first, second) == [PlaceJob(first, {OTHER: ()})]
    assert world.status("job-2").reason == "waits for its turn"
    assert world.tell(JobPlaced("job-1", OTHER)) == [
        StartJob(first, OTHER, 1),
        GrantShare("job-1", 1, 500),
        PlaceJob(second, {OTHER: (first,)}),
    ]


@pytest.mark.parametrize(
    ("device", "why", "reason"),
    [
        (None, "it would violate the SLO of bert", "waits for a device: it would violate the SLO of bert"),
        (OTHER, "", "waits for a device: the one that was chosen has no room any more"),
    ],
)
def test_job_without_a_place_is_placed_again_later(device: DeviceId | None, why: str, reason: str) -> None:
    world = World(place_again=5.0)
    world.places = False
    world.submit(job())
    assert world.tell(JobPlaced("job-1", device, why)) == []
    assert world.status().reason == reason
    world.places = True
    world.until(1004.9)
    assert world.status().state is JobState.QUEUED
    world.until(1005.0)
    assert world.status().state is JobState.RUNNING


def test_batch_inference_waits_for_its_model_and_stops_when_that_is_unloaded() -> None:
    world = World()
    world.submit(job(work=BatchInference(model="bert", input="a", output="b")))
    assert world.status().reason == "waits until the server has told which models it has"
    world.tell(ModelsChanged(frozenset(("gpt",))))
    assert world.status().reason == "waits for model 'bert', which is not loaded"
    world.tell(ModelsChanged(frozenset(("bert",))))
    assert world.status().state is JobState.RUNNING
    why = "waits for model 'bert', which is not loaded"
    assert world.tell(ModelsChanged(frozenset())) == [TellStop("job-1", 1, why)]
    world.exit()
    assert (world.status().state, world.status().reason) == (JobState.QUEUED, why)
    world.tell(ModelsChanged(frozenset(("bert",))))
    assert (world.status().state, world.status().attempt) == (JobState.RUNNING, 2)


# Yielding


def test_pressure_takes_all_at_once_and_gives_it_back_after_a_calm() -> None:
    world = running()
    pressed = PressureSeen({CPU: "the queue of bert grows"})
    assert world.tell(pressed) == [GrantShare("job-1", 1, 0)]
    assert world.status().reason == "yields to serving on cpu-0: the queue of bert grows"
    world.until(1000.2)
    assert world.tell(pressed) == []  # it lasts
    world.until(1000.4)
    assert world.share() == 0
    world.until(1000.5)
    assert (world.share(), world.status().reason) == (600, "")


def test_pressure_that_is_back_soon_has_jobs_wait_longer_up_to_a_limit() -> None:
    world = running()
    waits = []
    for _ in range(6):
        world.tell(PressureSeen({CPU: "busy"}))
        begun = world.now
        while not world.share():
            world.until(world.wake)
        waits.append(round(world.now - begun, 3))
        world.until(world.now + 1)
    assert waits == [0.3, 0.6, 1.2, 2.4, 3.0, 3.0]
    world.until(world.now + 10)
    world.tell(PressureSeen({CPU: "busy"}))
    assert world.wake == pytest.approx(world.now + 0.3)


def test_pressure_of_one_device_leaves_the_jobs_of_others_alone() -> None:
    world = World(devices={CPU: DeviceIdle(600), OTHER: DeviceIdle(400)})
    world.submit(job())
    assert world.tell(PressureSeen({OTHER: "busy"})) == []
    assert world.share() == 600


def test_nothing_is_started_under_pressure() -> None:
    world = World()
    world.tell(PressureSeen({CPU: "a rollout is in progress"}))
    assert world.submit(job()) == []
    assert world.status().reason == "yields to serving on cpu-0: a rollout is in progress"
    world.until(1000.3)
    assert world.status().state is JobState.RUNNING


def test_share_follows_what_is_idle_down_to_none() -> None:
    world = running()
    assert world.observe(250) == [GrantShare("job-1", 1, 250)]
    assert world.observe(0) == [GrantShare("job-1", 1, 0)]
    assert world.status().reason == "serving leaves nothing idle on cpu-0"
    assert world.observe(-3) == []
    assert world.observe(10) == [GrantShare("job-1", 1, 10)]


def test_share_is_taken_from_one_job_before_another_gets_it() -> None:
    world = World(devices={CPU: DeviceIdle(600)})
    world.submit(job("job-1"))
    commands = world.submit(job("job-2"))
    assert commands[-2:] == [GrantShare("job-1", 1, 300), GrantShare("job-2", 1, 300)]


def test_job_of_few_threads_gets_no_more_than_they_can_use() -> None:
    world = World(devices={CPU: DeviceIdle(1000, capacity=8.0)})
    world.submit(job("job-1", threads=2), job("job-2"))
    assert (world.share("job-1"), world.share("job-2")) == (250, 750)


# Fairness


def test_jobs_get_share_seconds_in_proportion_to_their_priorities() -> None:
    world = World(devices={CPU: DeviceIdle(500, capacity=2.0)})
    world.submit(job("job-1", priority=1), job("job-2", priority=3))
    world.run(60.0)
    taken = [world.attempts[each].spent for each in ("job-1", "job-2")]
    assert taken[1] / taken[0] == pytest.approx(3.0, rel=0.02)
    assert sum(taken) == pytest.approx(60.0, rel=0.02)


def test_job_of_long_steps_takes_no_more_than_its_part() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.step = {"job-1": 5.0}  # ten seconds of all that is idle
    world.submit(job("job-1"), job("job-2"))
    world.run(200.0)
    taken = [world.attempts[each].spent for each in ("job-1", "job-2")]
    assert abs(taken[0] - taken[1]) <= 5.0 + 1.0
    assert sum(taken) >= 0.9 * 100.0


def test_job_that_cannot_use_its_part_leaves_it_to_the_other_and_saves_nothing_up() -> None:
    world = World(devices={CPU: DeviceIdle(800)})
    world.used = {"job-1": 0.1}
    world.submit(job("job-1"), job("job-2"))
    world.run(60.0)
    taken = world.attempts["job-2"].spent
    assert taken > 0.8 * 0.8 * 60.0  # its own half and most of the other's
    world.attempts["job-1"].used = 1.0
    world.run(20.0)
    later = [world.attempts["job-1"].spent, world.attempts["job-2"].spent - taken]
    assert later[1] > 0.3 * sum(later)  # it is not made to wait until the first has had as much as in all


def test_job_that_comes_later_does_not_catch_up_with_what_was_taken_before() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job("job-1"))
    world.run(30.0)
    world.submit(job("job-2"))
    assert world.share("job-1") == pytest.approx(250, abs=5)


def test_attempt_that_overdrew_is_not_forgiven_by_its_death() -> None:
    world = World(devices={CPU: DeviceIdle(500)}, first_delay=0.1)
    world.step = {"job-1": 5.0}
    world.submit(job("job-1"), job("job-2"))
    world.run(0.5)
    world.exit("job-1")
    world.step = {}
    world.run(0.5)
    assert world.status("job-1").attempt == 2
    assert world.share("job-2") == 500


# Pause, resume, cancel


def test_paused_job_keeps_its_process_and_gets_nothing() -> None:
    world = running()
    assert world.tell(JobPauseAsked("job-1")) == [GrantShare("job-1", 1, 0)]
    status = world.status()
    assert (status.state, status.reason, status.granted) == (JobState.PAUSED, "paused by its owner", 0)
    assert world.tell(JobPauseAsked("job-1")) == []
    assert world.tell(JobResumeAsked("job-1")) == [GrantShare("job-1", 1, 600)]
    assert world.tell(JobResumeAsked("job-1")) == []
    assert world.status().state is JobState.RUNNING


def test_paused_job_leaves_its_turn_to_another() -> None:
    world = World(slots=1)
    world.submit(job("job-1"), job("job-2"))
    world.tell(JobPauseAsked("job-1"))
    assert world.status("job-2").state is JobState.RUNNING


def test_job_paused_while_it_waits_is_not_started() -> None:
    world = World(devices={CPU: DeviceIdle(0)})
    world.submit(job())
    world.tell(JobPauseAsked("job-1"))
    world.observe(500)
    assert world.status().state is JobState.PAUSED
    world.tell(JobResumeAsked("job-1"))
    assert world.status().state is JobState.RUNNING


def test_job_paused_while_its_place_is_chosen_is_not_started() -> None:
    world = World()
    world.places = False
    world.submit(job("job-1"), job("job-2"))
    world.tell(JobPauseAsked("job-1"))
    world.places = True
    world.tell(JobPlaced("job-1", CPU))
    assert world.status("job-1").state is JobState.PAUSED
    assert world.status("job-2").state is JobState.RUNNING


def test_cancelled_job_is_told_then_killed_and_ends_as_cancelled() -> None:
    world = running(grace=2.0)
    assert world.tell(JobCancelAsked("job-1")) == [TellStop("job-1", 1, "cancelled by its owner")]
    assert world.status().state is JobState.RUNNING
    assert world.status().reason == "cancelled by its owner"
    world.until(1001.9)
    assert world.tell(JobCancelAsked("job-1")) == []
    assert not world.attempts["job-1"].killed
    world.until(1002.0)
    assert world.attempts["job-1"].killed
    assert world.said.count(KillJob("job-1", 1, "cancelled by its owner")) == 1
    world.exit()
    status = world.status()
    assert (status.state, status.reason, status.ended_at) == (JobState.CANCELLED, "cancelled by its owner", 1002.0)
    assert world.stored["job-1"].status == status


def test_job_that_waits_is_cancelled_at_once() -> None:
    world = World(devices={})
    world.submit(job())
    world.tell(JobCancelAsked("job-1"))
    assert world.status().state is JobState.CANCELLED


def test_paused_job_can_be_cancelled_and_not_paused_again() -> None:
    world = running()
    world.tell(JobPauseAsked("job-1"))
    world.tell(JobCancelAsked("job-1"))
    world.tell(JobPauseAsked("job-1"))
    assert (world.status().state, world.share()) == (JobState.RUNNING, 600)
    world.exit()
    assert world.status().state is JobState.CANCELLED


def test_job_that_is_done_when_it_is_cancelled_has_succeeded() -> None:
    world = running()
    world.tell(JobCancelAsked("job-1"))
    world.exit(completed=True)
    assert world.status().state is JobState.SUCCEEDED


def test_cancel_of_a_job_that_yields_its_memory_ends_it() -> None:
    world = World(devices={CPU: DeviceIdle(500, memory=2 * MIB)}, memory_patience=0.0)
    world.submit(job(memory=2 * MIB))
    world.observe(memory=0)
    world.tell(JobCancelAsked("job-1"))
    world.exit()
    assert world.status().state is JobState.CANCELLED


def test_what_is_asked_of_a_job_that_is_not_there_changes_nothing() -> None:
    world = World()
    for event in (JobPauseAsked("x-1"), JobResumeAsked("x-1"), JobCancelAsked("x-1"), JobPlaced("x-1", CPU)):
        assert world.tell(event) == []


# Ends


def test_job_that_completes_has_succeeded() -> None:
    world = running()
    world.exit(completed=True)
    status = world.status()
    assert (status.state, status.reason, status.granted) == (JobState.SUCCEEDED, "", 0)
    assert world.scheduler.processes == 0


def test_job_that_fails_is_tried_again_after_a_delay_that_doubles_then_has_failed() -> None:
    world = running(retries=2)
    world.exit(reason="exit status 1")
    assert world.status().reason == "failed 1 of 3 times, and is started again 1 s after that: exit status 1"
    starts = []
    for _ in range(2):
        while not world.attempts:
            world.until(world.wake)
        starts.append(world.now)
        world.exit(reason="exit status 1")
    assert starts == [1001.0, 1003.0]
    status = world.status()
    assert (status.state, status.reason) == (JobState.FAILED, "exit status 1 (the last of 3 attempts)")
    assert status.attempt == 3


def test_job_that_fails_hopelessly_is_not_tried_again() -> None:
    world = running()
    del world.attempts["job-1"]
    world.tell(JobExited("job-1", 1, False, "train.py: No such file or directory", hopeless=True))
    assert (world.status().state, world.status().reason) == (
        JobState.FAILED,
        "train.py: No such file or directory",
    )


def test_job_without_retries_fails_with_its_reason_alone() -> None:
    world = running(retries=0)
    world.exit(reason="exit status 3")
    assert (world.status().state, world.status().reason) == (JobState.FAILED, "exit status 3")


def test_process_that_the_system_refuses_costs_no_retry() -> None:
    world = running(retries=0)
    del world.attempts["job-1"]
    world.tell(JobRefused("job-1", 1, "too many processes"))
    assert (world.status().state, world.status().reason) == (JobState.QUEUED, "waits for a process: too many processes")
    world.until(1001.0)
    assert (world.status().state, world.status().attempt) == (JobState.RUNNING, 2)


def test_refused_process_of_a_job_that_was_cancelled_ends_it() -> None:
    world = running()
    world.tell(JobCancelAsked("job-1"))
    del world.attempts["job-1"]
    world.tell(JobRefused("job-1", 1, "too many processes"))
    assert world.status().state is JobState.CANCELLED


def test_late_events_of_an_earlier_attempt_change_nothing() -> None:
    world = running()
    world.exit()
    world.until(1001.0)
    assert world.tell(JobExited("job-1", 1, True)) == []
    assert world.tell(JobProgressed("job-1", 1, 50, 100)) == []
    assert (world.status().state, world.status().progress.steps) == (JobState.RUNNING, 0)


def test_job_that_failed_while_paused_waits_for_its_owner() -> None:
    world = running()
    world.tell(JobPauseAsked("job-1"))
    world.exit()
    world.tell(JobResumeAsked("job-1"))
    assert world.status().reason == "waits until it is started again"
    world.tell(JobPauseAsked("job-1"))
    world.until(1100.0)
    assert world.status().state is JobState.PAUSED
    world.tell(JobResumeAsked("job-1"))
    assert (world.status().state, world.status().attempt) == (JobState.RUNNING, 2)


def test_jobs_that_ended_are_forgotten_once_there_are_too_many() -> None:
    world = World(history=2)
    for number in range(4):
        world.submit(job(f"job-{number}"))
        world.exit(f"job-{number}", completed=True)
    assert world.forgotten == ["job-0", "job-1"]
    assert world.stored.keys() == {"job-2", "job-3"}
    assert [status.job.id for status in world.scheduler.statuses()] == ["job-2", "job-3"]
    assert world.said[-1] == ForgetJob("job-1")


# Memory and devices that go


def test_jobs_with_too_much_memory_leave_one_by_one_after_a_while() -> None:
    world = World(devices={CPU: DeviceIdle(600, memory=6 * MIB)}, memory_patience=5.0)
    world.submit(*(job(f"job-{n}", memory=2 * MIB, priority=p) for n, p in ((1, 5), (2, 1), (3, 1))))
    world.observe(memory=3 * MIB)
    world.until(1004.9)
    assert world.told() == []
    world.until(1005.0)
    assert world.told() == ["job-3"]  # of the lowest priority the last
    world.observe()
    assert world.told() == ["job-2", "job-3"]
    world.observe()
    assert world.attempts["job-1"].told == ""
    world.exit("job-3")
    status = world.status("job-3")
    assert status.state is JobState.QUEUED
    assert status.reason.startswith("waits for memory")


def test_paused_job_leaves_first_where_memory_is_short_and_stays_paused() -> None:
    world = World(devices={CPU: DeviceIdle(600, memory=4 * MIB)}, memory_patience=0.0)
    world.submit(job("job-1", memory=2 * MIB, priority=9), job("job-2", memory=2 * MIB))
    world.tell(JobPauseAsked("job-1"))
    world.observe(memory=2 * MIB)
    assert world.attempts["job-1"].told == "waits for memory: 2 MiB are not free on cpu-0 any more"
    world.exit("job-1")
    assert world.status("job-1").state is JobState.PAUSED
    world.observe(memory=4 * MIB)
    world.tell(JobResumeAsked("job-1"))
    assert world.status("job-1").state is JobState.RUNNING


def test_memory_that_is_short_for_a_moment_stops_nobody() -> None:
    world = World(devices={CPU: DeviceIdle(600, memory=4 * MIB)}, memory_patience=5.0)
    world.submit(job(memory=4 * MIB))
    world.observe(memory=MIB)
    world.until(1004.0)
    world.observe(memory=4 * MIB)
    world.until(1020.0)
    assert not world.attempts["job-1"].told


def test_jobs_of_a_device_that_is_gone_wait_for_another() -> None:
    world = World(devices={CPU: DeviceIdle(600)})
    world.submit(job())
    world.devices = {}
    commands = world.observe()
    assert commands == [
        TellStop("job-1", 1, "waits for a device: cpu-0 takes no jobs any more"),
        GrantShare("job-1", 1, 0),
    ]
    world.exit()
    world.devices = {OTHER: DeviceIdle(300)}
    world.observe()
    assert (world.status().device, world.status().attempt) == (OTHER, 2)


# Progress and deadlines


def test_progress_adds_up_over_attempts() -> None:
    world = running()
    world.tell(JobProgressed("job-1", 1, 5, 20, 2.5, {"accuracy": 0.5, "loss": float("nan")}))
    assert world.status().progress.metrics == {"accuracy": 0.5}
    world.attempts["job-1"].spent = 3.0
    world.exit()
    world.until(1001.0)
    world.tell(JobProgressed("job-1", 2, 4, 20, 1.0))
    progress = world.status().progress
    assert (progress.steps, progress.total, progress.share_seconds) == (4, 20, 4.0)
    assert progress.metrics == {"accuracy": 0.5}


def test_share_seconds_that_go_back_or_are_none_are_not_charged() -> None:
    world = running()
    world.tell(JobProgressed("job-1", 1, share_seconds=2.0))
    world.tell(JobProgressed("job-1", 1, share_seconds=1.0))
    world.tell(JobProgressed("job-1", 1, share_seconds=float("nan")))
    assert world.status().progress.share_seconds == 2.0


def test_throughput_is_that_of_the_last_seconds() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job())
    world.run(10.0)
    assert world.status().progress.throughput == pytest.approx(50.0, rel=0.05)
    world.exit()
    assert world.status().progress.throughput == 0.0


def test_predicted_end_is_when_its_part_of_what_is_idle_has_done_the_rest() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job("job-1"))
    world.run(10.0, total=1000)  # 500 of 1000 steps of 10 ms at half a device
    assert world.status().predicted_end == pytest.approx(1020.0, abs=0.5)
    world.submit(job("job-2", priority=3))
    assert world.status("job-1").predicted_end == pytest.approx(1050.0, abs=2.0)
    assert world.status("job-2").predicted_end is None


def test_end_of_a_job_whose_device_is_gone_is_predicted_on_another() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job())
    world.run(10.0, total=1000)
    world.devices = {OTHER: DeviceIdle(250)}
    world.observe()
    assert world.status().predicted_end == pytest.approx(1030.0, abs=0.5)


def test_predicted_end_reckons_with_time_under_pressure() -> None:
    world = World(devices={CPU: DeviceIdle(500)}, idle_memory=10.0)
    world.submit(job())
    world.run(10.0, total=2000)
    calm = world.status().predicted_end
    for _ in range(200):
        world.tell(PressureSeen({CPU: "busy"}))
        world.run(0.1, total=2000)
    pressed = world.status().predicted_end
    assert calm is not None
    assert pressed is not None
    assert pressed > calm + 60.0


def test_deadline_that_will_be_missed_is_said_once_and_before_it_passes() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job(deadline=1060.0))
    world.run(10.0, total=1000)
    assert not world.warned
    assert not world.status().will_miss_deadline
    world.observe(50)
    for _ in range(30):
        world.run(1.0, total=10000)
    assert [(warning.id, warning.deadline) for warning in world.warned] == [("job-1", 1060.0)]
    assert world.warned[0].end is not None
    assert world.warned[0].end > 1060.0
    assert world.status().will_miss_deadline
    assert world.stored["job-1"].status.will_miss_deadline


def test_deadline_of_a_job_that_tells_no_end_is_missed_when_it_passes() -> None:
    world = World(devices={CPU: DeviceIdle(500)})
    world.submit(job(deadline=1010.0))
    world.run(9.0)
    assert not world.status().will_miss_deadline
    world.run(2.0)
    assert world.status().will_miss_deadline
    assert world.warned[0].end is None


@pytest.mark.parametrize(("deadline", "completed", "missed"), [(1050.0, True, False), (1000.5, True, True)])
def test_deadline_of_a_job_that_ended_was_met_or_missed(deadline: float, completed: bool, missed: bool) -> None:
    world = running(deadline=deadline)
    world.until(1001.0)
    world.exit(completed=completed)
    assert world.status().will_miss_deadline is missed


def test_interference_is_passed_on() -> None:
    world = running()
    seen = JobInterference(job_observed=1.1, serving_predicted=1.02)
    world.tell(JobInterfered("job-1", seen))
    assert world.status().interference == seen


# Restarts of the server


def test_stop_of_the_server_tells_jobs_and_they_go_on_after_it() -> None:
    world = running(grace=30.0)
    world.submit(job("job-2"))
    told = world.tell(JobsShutdown(5.0))
    assert [type(command) for command in told] == [TellStop, TellStop]
    world.submit(job("job-3"))
    assert world.status("job-3").reason == "waits for the server to start again"
    world.until(1005.0)
    assert world.attempts["job-2"].killed
    world.exit("job-1")
    world.exit("job-2")
    assert world.scheduler.processes == 0
    assert {stored.status.state for stored in world.stored.values()} == {JobState.QUEUED}

    after = World(devices={CPU: DeviceIdle(600)})
    after.tell(JobsRestored(tuple(world.stored.values())))
    assert (after.status("job-1").state, after.status("job-1").attempt) == (JobState.RUNNING, 2)
    assert after.stored["job-1"].failures == 0


def test_job_that_ran_when_the_server_died_is_tried_again_a_bounded_number_of_times() -> None:
    stored = running(retries=1).stored["job-1"]
    for failures, state in ((0, JobState.RUNNING), (1, JobState.FAILED)):
        world = World(devices={CPU: DeviceIdle(600)})
        world.tell(JobsRestored((msgspec.structs.replace(stored, failures=failures),)))
        world.until(1060.0)
        assert world.status().state is state
    assert world.status().reason == "the server died while it ran (the last of 2 attempts)"


def test_job_that_was_cancelled_when_the_server_died_is_not_started_again() -> None:
    world = running()
    world.tell(JobCancelAsked("job-1"))
    after = World()
    after.tell(JobsRestored(tuple(world.stored.values())))
    assert after.status().state is JobState.CANCELLED
    assert not after.attempts


def test_jobs_that_were_paused_or_had_ended_are_restored_as_they_were() -> None:
    world = running(retries=0)
    world.submit(job("job-2"))
    world.tell(JobPauseAsked("job-1"))
    world.exit("job-2", completed=True)
    after = World()
    after.tell(JobsRestored(tuple(world.stored.values())))
    assert after.status("job-1").state is JobState.PAUSED
    assert after.status("job-2") == world.status("job-2")
    assert not after.attempts
    after.tell(JobResumeAsked("job-1"))
    assert (after.status("job-1").state, after.status("job-1").attempt) == (JobState.RUNNING, 2)


def test_progress_is_stored_now_and_then_and_states_at_once() -> None:
    world = World(devices={CPU: DeviceIdle(500)}, keep_every=30.0)
    world.submit(job())
    assert world.stored["job-1"].status.state is JobState.RUNNING
    world.run(29.0, total=10000)
    assert world.stored["job-1"].status.progress.steps == 0
    world.run(2.0, total=10000)
    assert world.stored["job-1"].status.progress.steps > 0
