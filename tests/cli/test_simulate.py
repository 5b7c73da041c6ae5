"""`cotenant simulate`: a run, its figure, and scenarios."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import cotenant.cli.loading
from cotenant.control.orchestrator import Orchestrator
from tests.cli.program import Program


def test_simulate_a_plan_draws_it_and_prints_its_timeline(program: Program, folder: Path) -> None:
    said = program("simulate", "problem.toml", "--duration", "6", "--plot", "run.svg", "--json")
    assert (said.code, said.err) == (0, "wrote run.svg\n")
    assert ET.parse(folder / "run.svg").getroot().tag.endswith("svg")  # noqa: S314
    line = json.loads(said.out)["timeline"]
    assert line["step_s"] == pytest.approx(0.1)
    assert {len(line[name]) for name in ("waiting", "busy", "devices")} == {60}
    assert line["cost_per_hour"] is None
    table = program("simulate", "problem.toml", "--duration", "6").out
    assert "p99.9" in table
    assert "1 device, utilisation " in table and " requests queued, at most " in table


def test_simulate_with_a_controller_shows_its_decisions_and_replays(program: Program, folder: Path) -> None:
    (folder / "rise.toml").write_text(
        """
[[workload]]
model = "identity"
arrivals = "curve"
points = [["0s", 100], ["10s", 100], ["10s", 700]]
[[workload]]
model = "lookup"
rate = 20
"""
    )
    command = ("simulate", "problem.toml", "--workload", "rise.toml", "--duration", "30", "--adapt")
    said = program(*command, "--event-log", "decisions.jsonl", "--json")
    assert (said.code, said.err) == (0, "wrote decisions.jsonl\n")
    found = json.loads(said.out)
    adaptation = found["adaptation"]
    assert adaptation["solves"] >= 1 and adaptation["devices"] == {"cpu": 1}
    first = adaptation["decisions"][0]
    assert first["action"] == "plan again" and 10.0 < first["time"] < 15.0 and "identity is offered" in first["reason"]
    assert {row["model"] for row in found["models"]} == {"identity", "lookup"}
    replayed = json.loads(program("replay", "decisions.jsonl", "--json").out)
    assert replayed["identical"] and replayed["solves"] == adaptation["solves"]
    assert "plan again" in program(*command).out


def test_simulate_with_a_controller_gives_as_many_devices_as_needed_where_none_are_counted(
    program: Program, folder: Path
) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace("count = 1\n", ""))
    said = program("simulate", "problem.toml", "--duration", "30", "--adapt", "--scale", "12", "--json")
    adaptation = json.loads(said.out)["adaptation"]
    actions = [decision["action"] for decision in adaptation["decisions"]]
    assert any(action.startswith("acquire ") for action in actions)
    assert not any("cannot be had" in action for action in actions) and adaptation["devices"]["cpu"] >= 2


def test_simulate_with_the_controller_of_a_server_follows_as_quickly(program: Program, folder: Path) -> None:
    with (folder / "serve.toml").open("a") as settings:
        settings.write("[forecast]\nheadroom = 1.6\n")
    command = ("simulate", "--settings", "serve.toml", "--duration", "1", "--adapt", "--event-log", "decisions.jsonl")
    assert program(*command).code == 0
    built = json.loads((folder / "decisions.jsonl").read_text().splitlines()[0])
    assert built["options"]["headroom"] == 1.6


def test_simulate_with_jobs_shows_what_they_get_and_what_they_cost(program: Program, folder: Path) -> None:
    jobs = """
[[jobs]]
model = "identity"
name = "nightly"
steps = 100
deadline = "5s"
[[jobs]]
model = "lookup"
name = "large"
memory = "900GiB"
"""
    text = (folder / "problem.toml").read_text().replace("count = 1", 'count = 1\nmemory = "8GiB"')
    (folder / "jobs.toml").write_text(text + jobs)
    planned = program("plan", "jobs.toml").out
    assert "best-effort jobs, predicted" in planned and "job large waits: on cpu-0: it needs 900 GiB" in planned
    said = program("simulate", "jobs.toml", "--duration", "6", "--json")
    found = json.loads(said.out)
    assert [job["job"] for job in found["jobs"]] == ["nightly", "large"]
    nightly, large = found["jobs"]
    assert nightly["steps"] == 100 and nightly["ended_s"] < 5.0 and nightly["share_seconds"] > 0
    assert large["device"] is None and "900 GiB" in large["reason"]
    assert [row["model"] for row in found["without_jobs"]] == ["identity", "lookup"]
    shown = program("simulate", "jobs.toml", "--duration", "6", "--report", "run.html").out
    assert "serving beside jobs, and without them" in shown and "job large waits" in shown
    assert "best-effort jobs" in (folder / "run.html").read_text()


def test_simulate_with_lending_takes_what_others_leave(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    text = text.replace("count = 1", "count = 1\nprocessors = 2").replace("profiles.csv", "throttled.csv")
    text = text.replace("60, 80, 100", "60")
    (folder / "lending.toml").write_text(text)
    rows = [f"{name},cpu,{share},1,{100 / share},1,1" for name in ("identity", "lookup") for share in (20, 40, 100)]
    header = "model,kind,share_pct,batch,latency_ms,memory_mib,cpu_ms"
    (folder / "throttled.csv").write_text("\n".join([header, *rows]))
    runs = [("simulate",), ("simulate", "--lend"), ("simulate", "--lend", "--adapt")]
    found = [json.loads(program(*run, "lending.toml", "--duration", "10", "--json").out) for run in runs]
    held, lent, adapting = ({row["model"]: row["p50_s"] for row in run["models"]} for run in found)
    assert lent["identity"] < held["identity"] and adapting["identity"] < held["identity"]
    table = program("plan", "lending.toml", "--lend").out
    assert "lent" in table and "lent" not in program("plan", "lending.toml").out
    answer = json.loads(program("plan", "lending.toml", "--lend", "--report", "lending.html", "--json").out)
    assert "p50, lent" in (folder / "lending.html").read_text()
    assert answer["forecast_with_lending"]["models"].keys() == {"identity", "lookup"} and answer["plan"]["devices"]
    both = program("simulate", "lending.toml", "--lend", "--what-if", "rate=1.1", "--duration", "10", "--json")
    now = json.loads(both.out)[0]["report"]
    assert {row["model"]: row["p50_s"] for row in now["models"]} == lent


def test_simulate_with_prices_shows_cost(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace("count = 1", "price = 3.6"))
    table = program("simulate", "problem.toml", "--duration", "6", "--planner", "elastic").out
    assert "3.6 per hour, " in table and "per million answers within target" in table


def test_what_if_scenarios_are_compared(program: Program) -> None:
    changes = ("--what-if", "rate=identity:3", "--what-if", "devices=-1", "--what-if", "planner=elastic,slo=lookup:1s")
    command = ("simulate", "problem.toml", "--duration", "3", "--jobs", "1", *changes)
    said = program(*command)
    assert (said.code, said.err) == (0, "")
    assert "identity attainment" in said.out and "lookup p99" in said.out
    summary = (
        "devices=-1: 1 fewer, 150 requests/s unserved; SLO violated: identity 0.00 % < 99 %, lookup 0.00 % < 99 %."
    )
    assert summary in said.out
    found = json.loads(program(*command, "--json").out)
    assert [one["what_if"] for one in found] == [
        "now",
        "rate=identity:3",
        "devices=-1",
        "planner=elastic,slo=lookup:1s",
    ]
    assert [one["devices"] for one in found[1:3]] == [{"cpu": 1}, {}]
    offered = [{row["model"]: row["offered"] for row in one["report"]["models"]} for one in found]
    assert offered[1]["identity"] == pytest.approx(300, rel=0.2)
    assert offered[1]["lookup"] == offered[0]["lookup"] == offered[2]["lookup"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--what-if rates=2",
            "--what-if rates=2: 'rates' cannot be changed; available: rate, devices, kind, slo, planner",
        ),
        ("--what-if rate=nobody:2", "rate=nobody:2: no model 'nobody'; available: identity, lookup"),
        ("--what-if rate=2 --plot a.svg", "--plot draws one run; leave it out, or leave out --what-if"),
        ("--lend", "only shares of processors are lent, and no device has any; give `processors` in [[devices]]"),
        ("--plot run.txt", "run.txt: cannot draw a .txt; use .svg, .png or .pdf"),
    ],
)
def test_simulate_with_wrong_options_says_why(program: Program, arguments: str, message: str) -> None:
    assert program.refuses("simulate", "problem.toml", *arguments.split()).startswith(message)


def test_simulate_a_plan_of_another_problem_is_rejected(program: Program, folder: Path) -> None:
    program("plan", "problem.toml", "--output", "plan.json")
    text = (folder / "plan.json").read_text()
    for old, new, message in (
        ("cpu", "v100", "the plan is for other devices: v100: the problem has no devices of this kind"),
        (
            "lookup",
            "stranger",
            "the plan places 'stranger', which is not among the models identity, lookup; plan again",
        ),
    ):
        (folder / "other.json").write_text(text.replace(f'"{old}"', f'"{new}"'))
        assert program.refuses("simulate", "problem.toml", "--plan", "other.json").startswith(message)


def test_simulate_a_given_plan_does_not_plan(program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("plan", "problem.toml", "--output", "plan.json", "--planner", "elastic")
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"elastic"', '"by hand"'))
    command = ("simulate", "problem.toml", "--plan", "plan.json", "--duration", "1")
    assert program.refuses(*command, "--what-if", "rate=2", "--jobs", "1").startswith(
        "unknown planner 'by hand'; available: "
    )
    assert program(*command, "--what-if", "rate=2", "--jobs", "1", "--planner", "elastic").code == 0
    monkeypatch.delattr(cotenant.cli.loading, "load_planned")
    for again in (command, ("capacity", *command[1:], "--seeds", "1", "--jobs", "1")):
        assert program(*again).code == 0


WORKLOAD = """
[[workload]]
model = "identity"
arrivals = "steps"
rates = [300, 100]
every = "3s"
[[workload]]
model = "lookup"
arrivals = "closed"
callers = 2
think = "100ms"
"""


def test_simulate_with_a_workload_follows_its_rates_and_failures(program: Program, folder: Path) -> None:
    (folder / "w.toml").write_text(WORKLOAD)
    command = ("simulate", "problem.toml", "--workload", "w.toml", "--duration", "6", "--json")
    identity, lookup = json.loads(program(*command).out)["models"]
    assert identity["offered"] == pytest.approx(200, rel=0.1)
    assert 0 < lookup["offered"] < 20
    (folder / "w.toml").write_text(WORKLOAD + "[[failures]]\nparts = ['cpu-0']\ntime = '3s'\n")
    (hit, _) = json.loads(program(*command, "--scale", "2").out)["models"]
    assert hit["offered"] == pytest.approx(400, rel=0.1)
    assert hit["attainment"] == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("more", [(), ("--adapt",)])
def test_simulate_has_as_many_standby_workers_as_asked_for(
    program: Program, folder: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Told(Orchestrator):
        def __init__(self, *args: Any, standbys: int = 0) -> None:
            given.append(standbys)
            super().__init__(*args, standbys=standbys)

    monkeypatch.setattr("cotenant.sim.workers.Orchestrator", Told)
    said = program("simulate", "problem.toml", "--duration", "2", "--standby-workers", "2", *more, "--json")
    assert said.code == 0 and given[-1] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "error: w.toml: workload[0]: model 'identty' is unknown; did you mean 'identity'?\n"),
        (("--rate", "identity=1"), "error: --workload sets the rates; leave it out, or leave out --rate\n"),
    ],
)
def test_simulate_with_a_wrong_workload_is_rejected(
    program: Program, folder: Path, flags: tuple[str, ...], message: str
) -> None:
    (folder / "w.toml").write_text(WORKLOAD.replace("identity", "identty"))
    said = program("simulate", "problem.toml", "--workload", "w.toml", *flags)
    assert (said.code, said.err) == (1, message)


def test_what_if_with_failures_is_rejected(program: Program, folder: Path) -> None:
    (folder / "w.toml").write_text(WORKLOAD + "[[failures]]\nparts = ['cpu-0']\ntime = '3s'\n")
    said = program.refuses("simulate", "problem.toml", "--workload", "w.toml", "--what-if", "rate=2")
    assert said == "w.toml: failures are for one run of `cotenant simulate`; leave them out here"


def test_what_if_with_standby_workers_is_rejected(program: Program, folder: Path) -> None:
    said = program("simulate", "problem.toml", "--what-if", "rate=2", "--standby-workers", "1")
    assert (said.code, said.err) == (
        1,
        "error: --standby-workers is for one run; leave it out, or leave out --what-if\n",
    )
