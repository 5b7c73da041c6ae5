"""`--report FILE.html` of every command that has it: written whole or not at all, and asked for before long work."""

from __future__ import annotations

import os
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

import cotenant.cli.fleet_sizing
import cotenant.sim.plan_validation
from cotenant.cli.demo import report_demo
from cotenant.live.deployment import Deployment
from cotenant.measure.report import ModelReport, Report
from cotenant.planning import plan as plan_problem
from tests.cli.program import Program, serving
from tests.planners.problems import embedded

SHORT = ("--duration", "0.5", "--seeds", "2", "--jobs", "1", "--planner", "elastic")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are validated by a short simulation, and two fleets sized."""
    monkeypatch.setattr(cotenant.sim.plan_validation, "MAX_REQUESTS", 1000)
    monkeypatch.setattr(cotenant.cli.fleet_sizing, "STEPS", 2)


class Page:
    """A report that was read again, by a strict parser."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.root = ET.fromstring(self.text.partition("\n")[2])  # noqa: S314  # ours
        sections = list(self.root.iter("section"))
        self.headings = ["".join(section.findtext("h2") or "") for section in sections]
        self.answer = ["".join(element.itertext()) for element in sections[0].iter("p")]
        self.verdict = str(sections[0].get("class"))
        self.command = sections[-1].findtext("pre")
        self.captions = ["".join(element.itertext()) for element in self.root.iter("caption")]
        self.pictures = len(list(self.root.iter("img")))
        self.cells = ["".join(element.itertext()) for element in self.root.iter("td")]
        assert not [each for each in self.root.iter("img") if not str(each.get("src")).startswith("data:")]


CASES = {
    "plan": ("plan", "problem.toml", "--planner", "elastic", "--explain"),
    "compare": ("plan", "problem.toml", "--compare", "--planners", "elastic,squishy"),
    "capacity": ("capacity", "problem.toml", *SHORT),
    "growth": ("capacity", "problem.toml", "--growth", "2", *SHORT),
    "simulate": ("simulate", "problem.toml", "--duration", "3"),
    "adapt": ("simulate", "problem.toml", "--duration", "3", "--adapt"),
    "what-if": ("simulate", "problem.toml", "--duration", "2", "--jobs", "1", "--what-if", "rate=2"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_report_is_a_page_with_the_answer_first_and_how_to_make_it_again(
    program: Program, folder: Path, name: str
) -> None:
    command = (*CASES[name], "--report", "out/report.html")
    said = program(*command)
    assert said.code == 0, said.err
    assert "wrote out/report.html" in said.err and said.out.strip(), "the answer is printed as well"
    page = Page(folder / "out" / "report.html")
    assert page.headings[0] == "Answer" and page.answer and page.headings[-1] == "Make it again"
    assert "What was asked" in page.headings and "models" in page.captions
    assert shlex.split(str(page.command)) == ["cotenant", *command]
    assert {"problem.toml", "profiles.csv"} <= set(page.cells), "files that it depends on"
    if name != "compare":
        assert page.pictures >= 1
    assert [path.name for path in (folder / "out").iterdir()] == ["report.html"]


def test_report_of_a_plan_ranks_configurations_and_marks_those_of_the_plan(program: Program, folder: Path) -> None:
    assert program("plan", "problem.toml", "--planner", "elastic", "--report", "plan.html").code == 0
    page = Page(folder / "plan.html")
    assert any(caption.startswith("identity on cpu: SLO 100 ms") for caption in page.captions)
    assert "in the plan" in page.cells
    assert page.verdict == "answer good" and any(line.startswith("All SLOs are predicted") for line in page.answer)


def test_report_of_a_plan_that_serves_too_little_says_so(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text().replace("rate = 100", "rate = 100000")
    (folder / "problem.toml").write_text(text)
    assert program("plan", "problem.toml", "--planner", "elastic", "--report", "plan.html").code == 0
    page = Page(folder / "plan.html")
    assert page.verdict == "answer bad" and any(line.startswith("Not served: identity") for line in page.answer)


def test_report_of_a_load_test(program: Program, folder: Path) -> None:
    with serving(folder) as server:
        said = program("loadtest", "-a", server.address, "--duration", "2", "--report", "load.html")
    assert said.code == 0, said.err
    page = Page(folder / "load.html")
    assert page.headings == ["Answer", "The run", "Make it again"]
    assert {"identity", "lookup"} <= set(page.cells)


def run_of(**outcomes: dict[str, int]) -> Report:
    rows = [
        ModelReport(
            model=name,
            offered=100.0,
            served=100.0,
            goodput=float(counts["served"]),
            attainment=counts["served"] / sum(counts.values()),
            required=0.99,
            target=0.1,
            mean=0.01,
            p50=0.01,
            p99=0.02,
            p999=0.03,
            outcomes=counts,
        )
        for name, counts in outcomes.items()
    ]
    return Report(source="live", seconds=10.0, models=tuple(rows))


def test_report_of_a_demo_tells_what_was_missed_and_what_was_said(tmp_path: Path) -> None:
    problem = embedded()
    deployment = Deployment(offered={}, problem=problem, plan=plan_problem(problem, "elastic", validate=False))
    result = run_of(digits={"served": 1000}, bert={"served": 500, "rejected": 500})
    report_demo(tmp_path / "demo.html", deployment, result, ["Busy machine: other programs use 0.9 of 2 processors."])
    page = Page(tmp_path / "demo.html")
    assert page.verdict == "answer bad"
    assert page.answer == [
        "SLO violated: bert 50.0 % < 99 %.",
        "1,500 of 2,000 requests were answered within their targets.",
        "Busy machine: other programs use 0.9 of 2 processors.",
    ]
    assert {"The run", "The plan", "Configurations, ranked", "What was asked"} <= set(page.headings)


def test_report_of_a_demo_that_leaves_a_model_out_is_not_good(tmp_path: Path) -> None:
    problem = embedded()
    plan = msgspec.structs.replace(plan_problem(problem, "elastic", validate=False), unserved={"bert": 1.0})
    deployment = Deployment(offered={}, problem=problem, plan=plan)
    report_demo(tmp_path / "demo.html", deployment, run_of(digits={"served": 1000}), [])
    page = Page(tmp_path / "demo.html")
    assert page.verdict == "answer bad"
    assert page.answer[0] == "Not all models are served in full: the machine has no share left for bert."


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(
    ("path", "message"),
    [("report.pdf", "is an HTML file"), ("models", "is an HTML file"), ("/proc/none/report.html", "cannot be written")],
)
def test_report_that_cannot_be_written_is_an_error_before_anything_is_done(
    program: Program, monkeypatch: pytest.MonkeyPatch, name: str, path: str, message: str
) -> None:
    for work in ("load_plan", "load_planned", "load_problem"):
        monkeypatch.setattr(f"cotenant.cli.loading.{work}", lambda *_, **__: pytest.fail("work began"))
    for place in ("commands", "simulate", "capacity"):
        for work in ("load_plan", "load_planned", "load_problem"):
            monkeypatch.setattr(
                f"cotenant.cli.{place}.{work}", lambda *_, **__: pytest.fail("work began"), raising=False
            )
    assert message in program.refuses(*CASES[name], "--report", path)


def test_report_in_the_place_of_a_folder_is_rejected(program: Program, folder: Path) -> None:
    (folder / "a.html").mkdir()
    assert "--report a.html: is a folder" in program.refuses("plan", "problem.toml", "--report", "a.html")


def test_report_that_fails_leaves_what_was_there(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plan.html").write_text("of yesterday")

    replace = Path.replace

    def fails(self: Path, target: Path) -> Path:
        if target.suffix == ".html":
            raise OSError(28, os.strerror(28))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    said = program("plan", "problem.toml", "--planner", "elastic", "--report", "plan.html")
    assert (said.code, said.err.strip()) == (1, "error: plan.html: cannot be written: No space left on device")
    assert (folder / "plan.html").read_text() == "of yesterday"
    assert not list(folder.glob(".plan*"))


def test_report_names_options_of_the_environment(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTENANT_PLANNER", "elastic")
    assert program("plan", "problem.toml", "--report", "plan.html").code == 0
    assert "COTENANT_PLANNER=elastic" in Page(folder / "plan.html").text
