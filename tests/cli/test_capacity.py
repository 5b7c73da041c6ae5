"""`cotenant capacity`: the load that a plan sustains, and the fleet that more load needs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import cotenant.cli.fleet_sizing
import cotenant.sim.plan_validation
from tests.cli.program import Program

SHORT = ("--duration", "0.5", "--seeds", "2", "--jobs", "1", "--planner", "elastic")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are validated by a short simulation."""
    monkeypatch.setattr(cotenant.sim.plan_validation, "MAX_REQUESTS", 1000)


def test_capacity_of_a_plan_is_shown_drawn_and_printed(program: Program, folder: Path) -> None:
    said = program("capacity", "problem.toml", *SHORT, "--plot", "capacity.svg")
    assert (said.code, said.err) == (0, "wrote capacity.svg\n")
    assert "1 cpu sustains " in said.out and "is violated first" in said.out
    assert ET.parse(folder / "capacity.svg").getroot().tag.endswith("svg")  # noqa: S314
    found = json.loads(program("capacity", "problem.toml", *SHORT, "--json").out)
    it = found["capacity"]
    assert 0 < it["low"] <= it["multiple"] <= it["high"]
    kept = [level["multiple"] for level in it["levels"] if level["models"][it["limit"]]["mean"] >= 0.99]
    assert max(kept) == pytest.approx(it["multiple"])


@pytest.mark.slow
def test_capacity_with_growth_takes_the_cheapest_kind(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second kind of the same speed at half the price is the one to take."""
    monkeypatch.setattr(cotenant.cli.fleet_sizing, "STEPS", 2)
    lines = (folder / "profiles.csv").read_text().splitlines()
    (folder / "profiles.csv").write_text("\n".join([*lines, *(line.replace(",cpu,", ",half,") for line in lines[1:])]))
    text = (folder / "problem.toml").read_text().replace("rate = 100", "rate = 900").replace("count = 1", "price = 2.0")
    half = '\n[[devices]]\nkind = "half"\ncount = 0\nprice = 1.0\ncuts = [20, 40, 60, 80, 100]\n'
    (folder / "problem.toml").write_text(text + half)
    command = ("capacity", "problem.toml", *SHORT, "--growth", "3")
    said = program(*command)
    assert (said.code, said.err) == (0, "")
    drawn = program(*command, "--plot", "growth.svg", "--json")
    assert ET.parse(folder / "growth.svg").getroot().tag.endswith("svg")  # noqa: S314
    found = json.loads(drawn.out)
    assert [offer["growth"] for offer in found["offers"][:2]] == [1, 3]
    best = found["best"]
    assert list(best["devices"]) == ["half"]
    assert best["cost_per_hour"] == best["devices"]["half"]
    assert f"3 × the rates, 2850 requests/s, need {best['devices']['half']} half, " in said.out
    assert f"cpu alone would need {best['devices']['half']} cpu, +100 %" in said.out.replace("\n", " ")


def test_capacity_with_a_workload_plans_for_its_peak_rates(program: Program, folder: Path) -> None:
    entry = '[[workload]]\nmodel = "identity"\narrivals = "wave"\nlow = 10\nhigh = 80\nperiod = "1s"\n'
    (folder / "asked.toml").write_text(entry)
    (folder / "failing.toml").write_text(entry + '[[failures]]\nparts = ["cpu-0"]\ntime = "1s"\n')
    for command in (("capacity",), ("simulate", "--what-if", "rate=2")):
        message = program.refuses(*command, "problem.toml", "--planner", "elastic", "--workload", "failing.toml")
        assert message == "failing.toml: failures are for one run of `cotenant simulate`; leave them out here"
    said = program("capacity", "problem.toml", *SHORT, "--workload", "asked.toml", "--growth", "1", "--json")
    found = json.loads(said.out)
    (offer,) = found["offers"]
    assert list(offer["level"]["models"]) == ["identity"]
    (cut,) = found["best"]["plan"]["devices"][0]["partitions"]
    assert [(it["model"], it["rate"]) for it in cut["placements"]] == [("identity", pytest.approx(80))]
    assert found["capacity"]["multiple"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--growth 2 --plan plan.json", "--growth makes its own plans; leave out --plan"),
        ("--growth 2 --lend", "--growth sizes fleets without lending; leave out --lend"),
        ("--lend", "only shares of processors are lent, and no device has any; give `processors` in [[devices]]"),
        ("--growth 2 --planner best", "unknown planner 'best'; available: "),
        ("--plot a.txt", "a.txt: cannot draw a .txt; use .svg, .png or .pdf"),
        ("--plan nowhere.json", "nowhere.json: cannot be read: No such file or directory"),
    ],
)
def test_capacity_with_wrong_options_says_why(program: Program, arguments: str, message: str) -> None:
    assert program.refuses("capacity", "problem.toml", *arguments.split()).startswith(message)


def test_capacity_without_requests_or_feasible_slos_says_so(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace('slo = "100ms"', 'slo = "1ms"'))
    said = program("capacity", "problem.toml", *SHORT, "--growth", "2")
    assert said.code == 0
    assert "No fleet of these devices serves 2 × the rates: the SLO of identity is violated" in said.out.replace(
        "\n", " "
    )
    (folder / "problem.toml").write_text(text.replace("rate = 100", "rate = 0").replace("rate = 50", "rate = 0"))
    for more in ((), ("--growth", "2")):
        assert program.refuses("capacity", "problem.toml", *more) == (
            "no requests: all rates are 0; give some model a rate"
        )


def test_capacity_with_growth_below_one_sizes_for_less(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cotenant.cli.fleet_sizing, "STEPS", 2)
    said = program("capacity", "problem.toml", *SHORT, "--growth", "0.5")
    assert "0.5 × the rates, 75 requests/s, need 1 cpu; today's need 1 cpu" in said.out.replace("\n", " ")


def test_capacity_with_very_low_rates_shows_no_attainment(program: Program, folder: Path) -> None:
    """At first none of the requests comes within the run, and at larger multiples some do; or none ever does."""
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace("rate = 100", "rate = 0").replace("rate = 50", "rate = 0.5"))
    said = program("capacity", "problem.toml", *SHORT, "--seeds", "1")
    assert said.code == 0
    assert said.out.splitlines()[5].split() == ["1.00", "0.5", "-"]
    assert "lookup" in said.out
    (folder / "problem.toml").write_text(text.replace("rate = 100", "rate = 0").replace("rate = 50", "rate = 1e-6"))
    for more in ((), ("--growth", "2")):
        assert program.refuses("capacity", "problem.toml", *SHORT, *more) == (
            "no request arrived within 0.5 s; simulate longer, with --duration"
        )


def test_capacity_with_objective_rate_is_of_the_plans_rates(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text('objective = "rate"\n' + text)
    said = program("capacity", "problem.toml", *SHORT)
    assert "times the plan's" in " ".join(said.out.split()) and " × the plan's rates (95 %" in said.out


def test_capacity_with_closed_loop_callers_shows_no_rates(program: Program, folder: Path) -> None:
    (folder / "asked.toml").write_text('[[workload]]\nmodel = "identity"\narrivals = "closed"\ncallers = 2\n')
    command = ("capacity", "problem.toml", *SHORT, "--workload", "asked.toml")
    said = program(*command).out.replace("\n", " ")
    assert "1 cpu sustains " in said and " requests/s" not in said
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text(text.replace("rate = 100", "rate = 0"))
    assert program.refuses(*command, "--growth", "2").startswith(
        "the rate of 'identity' depends on its latency (closed-loop callers)"
    )


def test_capacity_with_a_single_seed_shows_no_interval(program: Program) -> None:
    for more in ((), ("--growth", "1")):
        said = program("capacity", "problem.toml", *SHORT, "--seeds", "1", *more).out
        assert "sustain" in said and "95 %" not in said and "±" not in said
    assert "(95 %: " in program("capacity", "problem.toml", *SHORT).out
