from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import cotenant


def test_package_every_public_name_exists() -> None:
    assert sorted(cotenant._HOMES) == sorted(cotenant.__all__)
    for name in cotenant.__all__:
        assert getattr(cotenant, name).__name__ == name


def test_package_dir_lists_public_names_before_use() -> None:
    code = "import cotenant; print(set(cotenant.__all__) - set(dir(cotenant)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_package_functions_accept_paths_as_text(tmp_path: Path) -> None:
    kind = cotenant.Kind(name="k", cuts=(500, 1000))
    points = [cotenant.Point(share=share, batch=1, latency=2 / share, memory=1 << 20) for share in kind.cuts]
    (tmp_path / "p.csv").write_text(cotenant.write_profiles([cotenant.Profile("m", "k", points)]))
    (tmp_path / "p.toml").write_text(
        'profiles = ["p.csv"]\n[[models]]\nname = "m"\nslo = "1s"\nrate = 1\n'
        '[[devices]]\nkind = "k"\ncuts = [50, 100]\n'
    )
    problem = cotenant.read_problem(f"{tmp_path}/p.toml")
    assert list(cotenant.read_profiles_file(f"{tmp_path}/p.csv")) == [("m", "k")]
    plan = cotenant.plan(problem)
    assert cotenant.check(plan, problem) == []
    assert cotenant.compare(problem, [plan], {}).rows[0].devices == 1
    assert cotenant.diff_plans(plan, plan).workers_started == 0
    assert cotenant.explain(plan, problem).unserved == ()
    assert isinstance(cotenant.simulate(plan, problem, seconds=1), cotenant.Report)


def test_problem_with_an_unknown_objective_is_rejected() -> None:
    with pytest.raises(cotenant.PlanError, match=r"^unknown objective 'device'; available: devices and rate$"):
        cotenant.Problem(models=(), rates={}, fleet=(), profiles={}, objective="device")  # type: ignore[arg-type]


def test_package_import_loads_nothing_heavy() -> None:
    code = "import sys, cotenant; print(sorted({'numpy', 'onnxruntime', 'grpc', 'typer', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_wheel_holds_the_files_of_the_page() -> None:
    root = Path(cotenant.__file__).parent.parent
    held = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    folder = "cotenant/live/page/static"
    assert {f"{folder}/{file.name}" for file in (root / folder).iterdir()} <= held
    assert {f"{folder}/index.html", f"{folder}/uPlot.LICENSE.txt"} <= held


def test_description_for_a_package_index_has_no_relative_link() -> None:
    root = Path(cotenant.__file__).parent.parent
    links = re.findall(r"\]\(([^)]*)\)", (root / "README.md").read_text())
    assert any(not link.startswith("http") for link in links)
    description = WheelBuilder(str(root)).metadata.core.readme
    assert "# Cotenant" in description
    assert re.findall(r"\]\((?!https?:)", description) == []
