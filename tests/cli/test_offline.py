"""Commands that need no server: what they print, and how they refuse."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cotenant.backends import cgroup
from cotenant.cli.loading import load_problem
from cotenant.config import read_settings
from cotenant.core.plan import Plan
from cotenant.planners import BASELINES, PLANNERS, Problem
from cotenant.planning import plan as plan_problem
from cotenant.zoo import ZOO
from tests.cli.program import COMMAND, PATIENCE, Program, alive, environment, started, workers_of


def test_examples_list_shows_every_model(program: Program) -> None:
    said = program("examples", "--list")
    assert (said.code, said.err) == (0, "")
    assert [line.split()[0] for line in said.out.splitlines()] == list(ZOO)
    assert list(json.loads(program("examples", "--list", "--json").out)) == list(ZOO)


def test_plan_prints_a_table_json_and_a_figure(program: Program, folder: Path) -> None:
    table = program("plan", "problem.toml", "--plot", "plan.svg", "--output", "deep/plan.json")
    assert table.code == 0
    assert table.err == "wrote deep/plan.json\nwrote plan.svg\n"
    for word in ("plan by geometry", "partition", "identity", "lookup", "100 ms", "predicted"):
        assert word in table.out
    assert "free" in program("plan", "problem.toml", "--planner", "elastic").out
    assert "violates" not in table.out
    assert ET.parse(folder / "plan.svg").getroot().tag.endswith("svg")  # noqa: S314

    said = program("plan", "problem.toml", "--json")
    plan = Plan.from_json(said.out.encode())
    assert (said.code, said.err) == (0, "")
    assert plan.planner == "geometry"
    assert plan.rate("identity") == pytest.approx(100)
    assert Plan.from_json(plan.to_json()) == plan
    written = Plan.from_json((folder / "deep" / "plan.json").read_bytes())
    assert written.devices == plan.devices


def test_plan_compare_ranks_planners(program: Program) -> None:
    said = program("plan", "problem.toml", "--compare", "--planners", "squishy, elastic")
    assert (said.code, said.err) == (0, "")
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["planners", "compared:", "fewest", "devices", "for", "the", "rates"]
    assert {row[0]: row[1] for row in lines[4:6]} == {"squishy": "1", "elastic": "1"}
    assert " need 1 device." in said.out

    found = json.loads(program("plan", "problem.toml", "--compare", "--json").out)
    assert {row["planner"] for row in found["rows"]} == PLANNERS.keys() - BASELINES
    assert found["objective"] == "devices" and found["summary"].endswith(".")
    assert all(row["violations"] == [] for row in found["rows"])


def test_plan_compare_of_the_example_ranks_the_planners(program: Program) -> None:
    """A real problem: what these planners make of profiles that were measured."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "problem.toml"
    found = json.loads(program("plan", example, "--compare", "--json").out)
    needed = {"geometry": 4, "elastic": 4, "elastic-plus": 4, "ideal": 5, "squishy": 5, "bestfit": 5}
    assert {row["planner"]: row["devices"] for row in found["rows"]} == needed
    assert not any(row["violations"] or row["unserved"] for row in found["rows"])
    assert found["bound"] == 4
    assert " need 4 devices (proven optimal); " in found["summary"] and found["summary"].endswith(" need 5 (+25 %).")


def test_simulate_a_plan_meets_its_slos(program: Program) -> None:
    """Where the forecast alone would leave a model beside batches that at times take longer than its target."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "problem.toml"
    program("plan", example, "--planner", "geometry", "--output", "plan.json")
    said = program("simulate", example, "--plan", "plan.json", "--duration", "20", "--json", "--seed", "1")
    assert all(row["attainment"] > 0.98 for row in json.loads(said.out)["models"])


def test_plan_with_a_time_limit_succeeds(program: Program) -> None:
    for flags in ((), ("--compare", "--planners", "geometry"), ("--explain",)):
        said = program("plan", "problem.toml", "--time-limit", "0.05", *flags)
        assert (said.code, said.err) == (0, "")
    assert program("plan", "problem.toml", "--time-limit", "0").code == 2
    assert Plan.from_json(program("plan", "--settings", "serve.toml", "--time-limit", "0.1", "--json").out.encode())


def test_plan_compare_with_a_failing_planner_shows_the_others(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "picky.py").write_text(
        "from cotenant.errors import PlanError\ndef plan(problem):\n    raise PlanError('8 models are [too] many')\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(PLANNERS, "picky", "picky")
    said = program("plan", "problem.toml", "--compare", "--planners", "picky,elastic")
    assert said.code == 0
    assert "picky has no plan: 8 models are [too] many" in said.out
    assert "elastic needs 1 device." in said.out
    (row,) = [line.split() for line in said.out.splitlines() if line.startswith("picky  ")]
    assert row == ["picky", "-", "-", "no", "plan"]


@pytest.mark.parametrize("objective", ["devices", "rate"])
def test_plan_compare_in_80_columns_is_complete(program: Program, folder: Path, objective: str) -> None:
    text = f'objective = "{objective}"\n' + (folder / "problem.toml").read_text() + "price = 1.5\n"
    (folder / "problem.toml").write_text(text.replace("rate = 100", "rate = 10000"))
    wide = program("plan", "problem.toml", "--compare", "--planners", "elastic,squishy").out
    assert all(len(line.rstrip()) <= 80 for line in wide.splitlines()[:6])
    assert ("unserved" in wide) == (objective == "devices")
    assert ("times" in wide) == (objective == "rate")


def test_plan_explain_shows_bottlenecks_and_gains(program: Program, folder: Path) -> None:
    said = program("plan", "problem.toml", "--explain")
    assert (said.code, said.err) == (0, "")
    assert "why this plan: candidates for evenly spaced requests" in said.out
    assert "validation: SLOs met in " in said.out
    assert "bottlenecks, and why not the next smaller share" in said.out
    assert "what relaxing a constraint would gain" in said.out
    assert [line for line in said.out.splitlines() if line.startswith("one more cpu") and "nothing" in line]
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace('slo = "100ms"', 'slo = "1ms"'))
    said = program("plan", "problem.toml", "--explain")
    assert "identity is unserved at 100 requests/s: a single request takes" in said.out
    found = json.loads(program("plan", "problem.toml", "--explain", "--json").out)
    (lack,) = found["explanation"]["unserved"]
    assert (lack["model"], lack["cause"]) == ("identity", "time")
    assert Plan.from_json(json.dumps(found["plan"])).unserved == {"identity": 100}


def test_plan_no_portfolio_tries_the_planner_alone(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def recorded(problem: Problem, planner: str, *, portfolio: bool = True) -> Plan:
        asked.append(portfolio)
        return plan_problem(problem, planner, portfolio=portfolio)

    monkeypatch.setattr("cotenant.planning.plan", recorded)
    assert program("plan", "problem.toml").code == 0
    assert program("plan", "problem.toml", "--no-portfolio").code == 0
    assert asked == [True, False]
    compared = program("plan", "problem.toml", "--compare", "--planners", "geometry,elastic", "--no-portfolio")
    assert compared.code == 0


def test_plan_diff_from_a_plan_in_force_shows_changes(program: Program, folder: Path) -> None:
    program("plan", "problem.toml", "--output", "current.json")
    same = program("plan", "problem.toml", "--diff", "current.json")
    assert "no change: the new plan equals the plan in force" in same.out
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace("rate = 50", "rate = 500").replace("count = 1", "count = 3"))
    said = program("plan", "problem.toml", "--diff", "current.json")
    assert said.code == 0
    assert "rates: lookup 50 to 500/s" in said.out and " to start, " in said.out
    found = json.loads(program("plan", "problem.toml", "--diff", "current.json", "--json").out)
    assert found["difference"]["rates"] == {"lookup": [pytest.approx(50), pytest.approx(500)]}
    assert found["plan"]["planner"]


def test_plan_diff_from_a_plan_of_another_problem_is_shown(program: Program, folder: Path) -> None:
    program("plan", "problem.toml", "--output", "current.json")
    text = (folder / "current.json").read_text()
    (folder / "other.json").write_text(text.replace('"identity"', '"stranger"').replace('"cpu"', '"v100"'))
    said = program("plan", "problem.toml", "--diff", "other.json")
    assert said.code == 0
    assert "note other.json places stranger, which this problem does not have; they stop" in said.out
    assert "note other.json uses devices of kind v100, which this problem does not have; they are released" in said.out
    assert "stranger 100 to 0/s" in said.out
    (folder / "other.json").write_text(text.replace('"identity"', '"x"').replace('"lookup"', '"y"'))
    said = program("plan", "problem.toml", "--diff", "other.json")
    assert "note other.json places none of this problem's models; is it the right plan?" in said.out


def test_plan_of_settings_is_compared_and_diffed(program: Program) -> None:
    program("plan", "--settings", "serve.toml", "--output", "current.json")
    assert "no change: " in program("plan", "--settings", "serve.toml", "--diff", "current.json").out
    assert " need 1 device (proven optimal)." in program("plan", "--settings", "serve.toml", "--compare").out


@pytest.mark.parametrize("planner", ["elastic", "squishy"])
def test_simulate_with_the_same_seed_repeats_exactly(program: Program, planner: str) -> None:
    command = ("simulate", "problem.toml", "--planner", planner, "--duration", "5", "--json")
    first, again, other = program(*command), program(*command), program(*command, "--seed", "1")
    assert first.out == again.out != other.out
    rows = {row["model"]: row for row in json.loads(first.out)["models"]}
    assert rows["identity"]["offered"] == pytest.approx(100, rel=0.2)
    assert rows["identity"]["attainment"] > 0.99
    table = program(*command[:-1])
    assert "identity" in table.out and "attainment" in table.out


def test_simulate_a_given_plan_at_given_rates_follows_them(program: Program) -> None:
    program("plan", "problem.toml", "--output", "plan.json")
    command = ("simulate", "problem.toml", "--plan", "plan.json", "--duration", "5", "--json", "--rate", "identity=10")
    rows = {row["model"]: row for row in json.loads(program(*command).out)["models"]}
    assert rows["identity"]["offered"] == pytest.approx(10, rel=0.4)
    assert rows.get("lookup", {"offered": 0})["offered"] == 0


def test_plan_of_settings_needs_no_server(program: Program) -> None:
    said = program("plan", "--settings", "serve.toml", "--json")
    plan = Plan.from_json(said.out.encode())
    assert [plan.rate("identity"), plan.rate("lookup")] == pytest.approx([20, 10])
    assert said.err == ""  # nothing was measured, so no progress is shown


def test_names_with_markup_are_shown_verbatim(program: Program, folder: Path) -> None:
    """Not as the colours that they would be to a terminal's library."""
    for file in ("problem.toml", "profiles.csv"):
        (folder / file).write_text((folder / file).read_text().replace("identity", "[/red]"))
    for command in ("plan", "simulate"):
        said = program(command, "problem.toml")
        assert said.code == 0 and "[/red]" in said.out
    (folder / "odd" / "[red]").mkdir(parents=True)
    assert "; [red]: odd/[red]: no version; put the model into" in program.refuses("plan", "--model-repository", "odd")


def test_plan_with_unserved_rates_shows_them(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace('slo = "100ms"', 'slo = "1ms"'))
    said = program("plan", "problem.toml")
    (row,) = [line for line in said.out.splitlines() if "identity" in line and "unserved" in line]
    assert "100" in row
    assert Plan.from_json(program("plan", "problem.toml", "--json").out.encode()).unserved == {"identity": 100}


def test_repository_without_a_model_names_the_first_few_folders_and_counts_the_others(
    program: Program, folder: Path
) -> None:
    for number in range(8):
        (folder / "cache" / f"m{number}").mkdir(parents=True)
    said = program.refuses("plan", "cache")
    assert "; m4: " in said and "m5" not in said and said.rstrip().endswith("; and 3 more")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate = 100", "rates = 1", "problem.toml: models[0]: unknown key 'rates'; did you mean 'rate'?"),
        ("count =", "counts =", "problem.toml: devices[0]: unknown key 'counts'; did you mean 'count'?"),
        ('slo = "100ms"', "slo = inf", "problem.toml: models[0].slo: 'inf' is not a quantity; write it as"),
        ('slo = "100ms"', "slo = nan", "problem.toml: models[0].slo: 'nan' is not a quantity; write it as"),
        ('slo = "100ms"', 'slo = "1e999s"', "problem.toml: models[0].slo: '1e999s' is out of range"),
        ("rate = 100", "rate = inf", "problem.toml: models[0].rate: inf requests/s; a rate is finite"),
        ('"lookup"', '"nobody"', "problem.toml: models[1].name: 'nobody' has no profile on 'cpu'; measure one with"),
        ('"lookup"', '"identity"', "problem.toml: two entries for the model 'identity'; list each once"),
        ("profiles.csv", "p.csv", "p.csv: cannot be read: No such file or directory"),
        ("profiles.csv", "models", "models: cannot be read: Is a directory"),
        ("profiles.csv", "problem.toml", "problem.toml:1: "),
        ("rate = 100", "rate = ", "problem.toml: is not TOML: "),
    ],
)
def test_problem_with_a_mistake_is_rejected(program: Program, folder: Path, old: str, new: str, message: str) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace(old, new, 1))
    assert program.refuses("plan", "problem.toml").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan nowhere.toml", "nowhere.toml: cannot be read: No such file or directory"),
        ("plan problem.toml --planner best", "unknown planner 'best'; available: "),
        ("plan problem.toml --model-repository models", "--model-repository and --settings replace PROBLEM"),
        ("plan problem.toml --plot plan.txt", "plan.txt: cannot draw a .txt; use .svg, .png or .pdf"),
        ("plan problem.toml --plot serve.toml/plan.svg", "serve.toml/plan.svg: cannot be written: "),
        ("plan problem.toml --output serve.toml/plan.json", "serve.toml/plan.json: cannot be written: "),
        ("plan problem.toml --diff nowhere.json", "nowhere.json: cannot be read: No such file or directory"),
        ("plan problem.toml --diff problem.toml", "problem.toml: not a plan: "),
        ("plan problem.toml --planners elastic", "--planners is for --compare; --planner selects"),
        ("plan problem.toml --compare --planners best", "unknown planner 'best'; available: "),
        ("plan problem.toml --compare --planners ,", "--planners ',' names none; write some of "),
        (
            "plan problem.toml --compare --explain",
            "--explain is for a single plan; leave it out, or leave out --compare",
        ),
        ("plan nowhere.toml --compare", "nowhere.toml: cannot be read: No such file or directory"),
        ("plan problem.toml --compare --settings serve.toml", "--model-repository and --settings replace PROBLEM"),
        ("plan problem.toml --output models", "models: cannot be written: Is a directory"),
        ("plan problem.toml --output .", ".: cannot be written: Is a directory"),
        ("simulate problem.toml --rate nobody=3", "--rate nobody=3: no model 'nobody'; available: identity, lookup"),
        ("simulate problem.toml --rate identity", "--rate identity: write MODEL=REQUESTS_PER_SECOND, such as"),
        ("simulate problem.toml --rate identity=-1", "--rate identity=-1: write MODEL=REQUESTS_PER_SECOND"),
        ("simulate problem.toml --scale inf", "a rate of inf requests/s must be finite"),
        ("simulate problem.toml --seed -1", "seed -1 is negative"),
        ("simulate problem.toml --plan profiles.csv", "profiles.csv: not a plan: "),
        ("replay nowhere", "nowhere: cannot be read: No such file or directory"),
        ("replay models", "models: cannot be read: Is a directory"),
        ("replay problem.toml", "problem.toml:1: not a line of an event log: "),
        (
            "status --address 127.0.0.1:1",
            "no server answers at '127.0.0.1:1': Connection refused; start",
        ),
        (
            "status --address localhost:http",
            "no server answers at 'localhost:http': nonnumeric port: 'http'; start",
        ),
        (
            "loadtest --address 127.0.0.1:1",
            "no server answers at '127.0.0.1:1': Connection refused; start",
        ),
        ("serve nowhere.toml", "nowhere.toml: cannot be read: No such file or directory"),
        ("serve problem.toml", "problem.toml: is a problem, not a server's settings: it has [[devices]]; give it to"),
        ("plan serve.toml", "serve.toml: is a server's settings, not a problem: it has a model_repository; give it"),
        ("serve --planner best", "unknown planner 'best'; available: "),
        ("serve models --model-repository cache", "two model repositories, 'models' and 'cache'; leave out one"),
        ("plan models --model-repository cache", "two model repositories, 'models' and 'cache'; leave out one"),
        (
            "serve --model-repository nowhere",
            "no model repository at 'nowhere': No such file or directory; name",
        ),
        (
            "serve --model-repository serve.toml",
            "no model repository at 'serve.toml': Not a directory; name",
        ),
        ("serve --model-repository cache", "no model in 'cache' can be served; build some with `cotenant examples`"),
        ("examples nobody", "no model 'nobody' in the zoo; it has digits, "),
        (
            "examples lenet -r serve.toml/zoo",
            "cannot write models into 'serve.toml/zoo': Not a directory",
        ),
    ],
)
def test_command_that_cannot_be_done_says_why(program: Program, folder: Path, arguments: str, message: str) -> None:
    (folder / "cache").mkdir()
    assert program.refuses(*arguments.split()).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("grace", "graze", "serve.toml: unknown key 'graze'; did you mean 'grace'?"),
        ("http_port", "http_prot", "serve.toml: unknown key 'http_prot'; did you mean 'http_port'?"),
        (
            '"lookup"',
            '"nobody"',
            "model 'nobody' has settings, but is not in models; it holds broken, identity, lookup",
        ),
        ("rate = 20", "rate = nan", "serve.toml: models[0].rate: nan requests/s; a rate is finite and at least 0"),
        ('slo = "2s"', 'slo = "0s"', "serve.toml: models[0].slo: a target of '0s' must be above 0"),
        ('grace = "5s"', 'planner = "best"', "serve.toml: planner: 'best' is unknown; use '"),
        ('grace = "5s"', 'event_log = "models/nowhere/log"', "models/nowhere/log: cannot write the event log: "),
    ],
)
def test_settings_with_a_mistake_are_rejected(program: Program, folder: Path, old: str, new: str, message: str) -> None:
    text = (folder / "serve.toml").read_text()
    (folder / "serve.toml").write_text(text.replace(old, new, 1))
    assert program.refuses("serve", "serve.toml").startswith(message)


@pytest.mark.parametrize("front", ["http", "grpc", "metrics"])
def test_serve_on_a_port_in_use_starts_no_worker(program: Program, folder: Path, front: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = (folder / "serve.toml").read_text()
        (folder / "serve.toml").write_text(text.replace(f"{front}_port = 0", f"{front}_port = {port}"))
        message = program.refuses("serve", "serve.toml")
    assert str(port) in message
    assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def test_serve_without_a_writable_cgroup_says_so(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group is a file, which is refused to root as well."""
    group = cgroup.Cgroup(folder / "profiles.csv", folder, 1)
    monkeypatch.setattr(cgroup, "own_cgroup", lambda controller: group)
    (folder / "serve.toml").write_text('cpu = { enforcement = "quota" }\n' + (folder / "serve.toml").read_text())
    message = program.refuses("serve", "serve.toml")
    assert "no cgroup quota can be set at" in message and message.endswith('enforcement = "throttle"')
    assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def test_options_with_wrong_values_print_usage(program: Program) -> None:
    for arguments in (
        "simulate problem.toml --duration 0",
        "simulate problem.toml --duration inf",
        "simulate problem.toml --duration 10parsecs",
        "serve --http-port 65536",
        "serve --log-level loud",
        "plann",
        "plan --jsn",
        "simulate problem.toml --scale nan",
    ):
        said = program(*arguments.split())
        assert said.code == 2
        assert "Usage: cotenant" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("front_end", ["http", "grpc", "metrics"])
def test_port_options_have_the_bounds_and_defaults_of_the_settings(
    program: Program, monkeypatch: pytest.MonkeyPatch, front_end: str
) -> None:
    for value in ("-1", "65536"):
        said = program("serve", f"--{front_end}-port", value)
        assert said.code == 2 and f"--{front_end}-port" in said.err
    monkeypatch.setenv("COLUMNS", "200")
    default = getattr(read_settings(None), f"{front_end}_port")
    (line,) = [line for line in program("serve", "--help").out.splitlines() if f"--{front_end}-port" in line]
    assert f"Default: {default}." in line
    monkeypatch.setenv(variable := f"COTENANT_{front_end.upper()}_PORT", "65536")
    said = program("serve")
    assert said.code == 2 and variable in said.err


def test_problem_of_a_server_is_read_without_planning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it plans it next."""

    def plan(*given: object, **options: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("cotenant.planning.plan", plan)
    monkeypatch.setattr("cotenant.app.deployment_builder.plan_problem", plan)
    problem = load_problem(None, Path("serve.toml"), None)
    assert {model.name for model in problem.models} == {"identity", "lookup"}


@pytest.mark.parametrize("arguments", [["plan", "problem.toml"], ["plan", "problem.toml", "--json"]])
def test_output_that_cannot_be_written_fails_without_traceback(folder: Path, arguments: list[str]) -> None:
    def run(output: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=PATIENCE,
            check=False,
        )

    ours, theirs = os.pipe()
    os.close(ours)
    gone = run(theirs)
    os.close(theirs)
    assert (gone.returncode, gone.stderr) == (1, "")
    full = os.open("/dev/full", os.O_WRONLY)
    failed = run(full)
    os.close(full)
    assert (failed.returncode, failed.stderr) == (1, "error: standard output: No space left on device\n")


def test_output_in_an_ascii_locale_replaces_characters(folder: Path) -> None:
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    process = started(folder, "plan", "problem.toml", env=ascii_alone)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert "identity" in out and out.isascii()
