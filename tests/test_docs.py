"""What the documentation names exists."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from benchmarks.mutants.__main__ import read_faults
from cotenant.control.controller_status import ModelState
from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome
from cotenant.live.metrics import AdaptationReading, LaneReading, RolloutReading, ServerCollector, render
from cotenant.live.nodes.node_status import NodeStatus
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.statistics import ModelCounts
from cotenant.measure.histogram import Histogram
from cotenant.worker.wire import Timing
from tests.live.jobs_shown import running

DOCS = Path(__file__).parent.parent / "docs"
NOT_FOUND = "\N{EN DASH}"  # in a table: nothing of it was found
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def exported() -> dict[str, set[str]]:
    """Labels by the name of each sample of a server that has something to say everywhere."""
    lane, partition = LaneId.parse("cpu-0/0"), PartitionLabel("cpu-0", "0")
    counts = ModelCounts("m", "1")
    counts.ran(lane, partition, 1, 0.1, 0.1, Timing(5.0, 0.0, 0.1, 0.0, 0.0, 0.1), alone=0.1)
    counts.ledger.reasons[Outcome.REJECTED, "why"] = 1
    reading = LaneReading(
        lane=lane, partition=partition, models=("m",), up=True, share=200, used_share=200, waiting={"m": 0}
    )
    adaptation = AdaptationReading(
        models={"m": ModelState(offered=1, planned=1, sustained=1, slowdown=1, observed_slowdown=1, attainment=None)},
        foreign_load=0.5,
        short=False,
        replans={("rate", "keep"): 1},
        late=0,
        handling=Histogram(),
        solving=Histogram(),
        rollouts=Histogram(),
    )
    collector = ServerCollector(
        [counts],
        [reading],
        workers={"ready": 1},
        rollouts=RolloutReading(outcomes={"completed": 1}, durations={"switch": Histogram()}),
        adaptation=adaptation,
        backend="cpu",
        isolation="",
        jobs=[running(deadline=1e9)],
        nodes=[
            NodeStatus(name="n", address="h:1", up=True, reason="", round_trip=1e-3, sessions=1, devices={"cpu": 1})
        ],
    )
    names: defaultdict[str, set[str]] = defaultdict(set)
    parse: Callable[[str], Iterable[Metric]] = parse_openmetrics
    for family in parse(render(collector, "application/openmetrics-text")[0].decode()):
        names[family.name] |= set()
        for sample in family.samples:
            names[sample.name] |= set(sample.labels)
            names[family.name] |= set(sample.labels)
    return dict(names)


@pytest.mark.parametrize("page", ["examples/alerts.yml", "examples/grafana.json", "operating.md", "reference.md"])
def test_metrics_that_are_named_are_exported(page: str) -> None:
    named = set(re.findall(r"\b(?:cotenant|nv|process)_[a-z_]*[a-z]\b", (DOCS / page).read_text()))
    assert named and named <= exported().keys()


def dashboard() -> Any:
    return json.loads((DOCS / "examples" / "grafana.json").read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Each expression of the dashboard and of the alerts, with what a panel calls its lines."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for rule in re.split(r"- alert:", (DOCS / "examples" / "alerts.yml").read_text())[1:]:
        yield rule[rule.index("expr:") + 5 : rule.index("labels:")], ""


@pytest.mark.parametrize(("expression", "legend"), list(queries()))
def test_queries_use_labels_that_their_metrics_have(expression: str, legend: str) -> None:
    labels = exported() | {"up": set()}
    metrics = [name for name in re.findall(r"\w+", expression) if name in labels]
    assert metrics
    for name, selected in re.findall(r"(\w+)\{(.*?)\}", expression):
        assert set(re.findall(r"(\w+)!?=", selected)) <= labels[name] | SCRAPED, name
    common = set.intersection(*(labels[name] | SCRAPED for name in metrics))
    kept = [{label.strip() for label in group.split(",")} for group in re.findall(r"by \((.*?)\)", expression)]
    assert all(group <= common | {"le"} for group in kept)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= (kept[0] if kept else common)


def test_dashboard_has_panels_that_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_commands_of_docs_and_makefile_name_modules_that_exist() -> None:
    root = DOCS.parent
    texts = [root / "Makefile", root / "README.md", root / "CHANGELOG.md", *DOCS.glob("*.md")]
    named = {
        name
        for text in texts
        for name in re.findall(r"python -m ((?:benchmarks|experiments)[.\w]*\w)", text.read_text())
    }
    listed = re.search(r"for name in (.+); do", (root / "Makefile").read_text())
    assert listed is not None
    named |= {f"benchmarks.{name}" for name in listed[1].split()}
    missing = sorted(name for name in named if not _exists(root / Path(*name.split("."))))
    assert named and not missing


def test_seeded_faults_apply_to_the_tree() -> None:
    faults = read_faults()
    assert faults
    for fault in faults:
        fault.applied((DOCS.parent / fault.file).read_text())  # raises where its line is not there once
        for guard in fault.guards():
            file, _, test = guard.partition("::")
            assert (DOCS.parent / file).exists(), fault
            assert not test or f"def {test}(" in (DOCS.parent / file).read_text(), fault


def _exists(module: Path) -> bool:
    return module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_pages_lead_to_headings_that_exist() -> None:
    wrong = [
        f"{page.name}: {target}#{anchor}"
        for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
        for target, anchor in re.findall(r"\]\(([\w/.-]*\.md)?(?:#([\w-]+))?\)", page.read_text())
        if (target or anchor)
        and not (
            (place := page.parent / target if target else page).is_file() and (not anchor or anchor in anchors(place))
        )
    ]
    assert wrong == []


def test_each_no_beside_other_servers_has_its_reason_and_each_claim_its_source() -> None:
    text = (DOCS / "compare.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    features = [row for row in rows if len(row) == 9 and row[0]]
    assert len(features) > 45
    reasons = [row[0] for row in rows if len(row) == 2 and row[0]]
    assert sorted(row[0] for row in features if row[1] == "no") == sorted(reasons)
    sources = set(re.findall(r"^\[(\w+)\]: https://\S+$", text, re.M))
    for row in features:
        assert row[1] == "no" or re.fullmatch(r"\[[^\]]+\]\([\w-]+\.md(#[\w-]+)?\)", row[1]), row
        for claim in row[2:]:
            found = re.fullmatch(r"\[[^\]]+\]\[(\w+)\]", claim)
            assert claim == NOT_FOUND or (found is not None and found[1] in sources), row
    assert sources == set(re.findall(r"\]\[(\w+)\]", text))
