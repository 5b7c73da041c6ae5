from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.config import read_problem, read_profiles_file, read_settings
from cotenant.core.background_job import BackgroundJob
from cotenant.core.model import Kind, Model
from cotenant.errors import ConfigError
from cotenant.planners.check import check
from cotenant.planning import plan as plan_problem
from cotenant.predictors import Load

PROFILE = """model,kind,share_pct,batch,latency_ms,memory_mib
resnet50,v100,20,1,4.258,1420
resnet50,v100,100,1,2.1,1420
"""
PROBLEM = """
objective = "devices"
profiles = ["profiles.csv"]
interference = "none"

[[models]]
name = "resnet50"
slo = "108ms"
rate = 200

[[devices]]
kind = "v100"
count = 4
memory = "32GiB"
price = 3.06
cuts = [10, 20, 40, 12.5, 100]
max_partitions = 2
"""


def written(folder: Path, problem: str = PROBLEM) -> Path:
    (folder / "profiles.csv").write_text(PROFILE)
    (folder / "problem.toml").write_text(problem)
    return folder / "problem.toml"


def test_read_problem_converts_units(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path))
    assert problem.models == (Model(name="resnet50", slo=0.108),)
    assert problem.rates == {"resnet50": 200.0}
    assert problem.fleet == (
        Kind(name="v100", count=4, memory=32 << 30, price=3.06, cuts=(100, 125, 200, 400, 1000), max_partitions=2),
    )
    assert problem.profiles["resnet50", "v100"].latency(1, 200) == pytest.approx(0.004258)
    assert problem.interference.slowdown(None, ()) == 1.0  # type: ignore[arg-type]


def test_read_problem_with_minimal_keys_fills_defaults(tmp_path: Path) -> None:
    text = PROBLEM
    for line in ('objective = "devices"', 'interference = "none"', "count = 4", 'memory = "32GiB"', "price = 3.06"):
        text = text.replace(line, "")
    problem = read_problem(written(tmp_path, text.replace("cuts = [10, 20, 40, 12.5, 100]", "")))
    assert problem.objective == "devices"
    assert problem.fleet == (Kind(name="v100", count=None, max_partitions=2),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slo =", "slos =", "models[0]: unknown key 'slos'; did you mean 'slo'?"),
        ("kind =", "kinds =", "devices[0]: unknown key 'kinds'; did you mean 'kind'?"),
        (
            "objective =",
            "zzz =",
            "unknown key 'zzz'; available: profiles, models, applications, devices, objective, interference",
        ),
        ('"108ms"', "108", 'models[0].slo: \'108\' has no unit of time; write it as "25ms" or "1.5s"'),
        ('"108ms"', '"0ms"', "models[0].slo: a target of '0ms' must be above 0"),
        ('"108ms"', "true", "models[0].slo: found true or false; write a number or text in quotes"),
        (
            "rate = 200",
            "",
            "models[0]: 'resnet50' has no rate; give it one, in requests/s, or use it in an application",
        ),
        ("rate = 200", "rate = -1", "models[0].rate: -1 requests/s; a rate is finite and at least 0"),
        ("rate = 200", "rate = 1\nattainment = 1.5", "models[0].attainment: 1.5 must be above 0 and at most 1"),
        ("rate = 200", "rate = 1\npriority = -1", "models[0].priority: -1 must be at least 1, the highest priority"),
        ("rate = 200", "rate = 1\nmax_queue_delay = 5", "models[0].max_queue_delay: '5' has no unit of time"),
        ('"devices"', '"speed"', "objective: 'speed' is unknown; use 'devices' or 'rate'"),
        ('"none"', '"linear"', "interference: 'linear' is unknown; use 'none' or"),
        ('"none"', '{ model = "margin", factor = 0.5 }', "interference: a margin needs a factor of at least 1: {"),
        (
            '"none"',
            '{ model = "gaussian-process", fit = "pairs.csv", quantile = 1.5 }',
            "interference.quantile: 1.5 must be between 0 and 1",
        ),
        ("count = 4", "count = -4", "devices[0].count: -4 devices; write 0 to 1000000"),
        ("count = 4", "count = 1000000000000", "devices[0].count: 1000000000000 devices; write 0 to 1000000"),
        ("max_partitions = 2", "max_partitions = 0", "devices[0].max_partitions: 0 must be at least 1"),
        ("max_partitions = 2", "processors = 0", "devices[0].processors: 0 must be above 0 and at most 4096"),
        ("rate = 200", "rate = nan", "models[0].rate: nan requests/s; a rate is finite and at least 0"),
        ('slo = "108ms"', 'slo = "1e14s"', "models[0].slo: a target of '1e14s' is out of range"),
        ('"v100"', '"v\\u0000"', "devices[0].kind: 'v\\x00' contains a NUL character; rename it"),
        ("count = 4", "count = 4.5", "devices[0].count: found a number; write a whole number"),
        ('"32GiB"', "32", "devices[0].memory: '32' has no unit of memory; write it as"),
        ('"v100"', '"a/v100/16"', "devices[0].kind: 'a/v100/16' is neither KIND nor NODE/KIND; rename it"),
        (
            "count = 4",
            'count = 4\nnetwork = "1ms"',
            "devices[0].network: 'v100' is not a kind of a node, such as 'node-a/v100'",
        ),
        ("price = 3.06", "price = -1", "devices[0].price: -1 must be finite and at least 0"),
        ("cuts = [10", "cuts = [0", "devices[0].cuts: a share of 0 % must be above 0 and at most 100"),
        ("cuts = [10, 20, 40, 12.5, 100]", "cuts = []", "devices[0].cuts: no share is legal; write at least one"),
        ('"v100"', '"a100"', "models[0].name: 'resnet50' has no profile on 'a100'; measure one with"),
        (
            "[[devices]]",
            '[[devices]]\nkind = "a100"\n[[devices]]',
            "devices[0].kind: no model has a profile on 'a100'; measure one with `cotenant profile`, correct the name",
        ),
        ('"32GiB"', '"1GiB"', "devices[0].memory: 1 GiB hold no model; the smallest, 'resnet50', needs 1.39 GiB"),
        ("count = 4", 'geometry = "mig-a100-80gb"', "devices[0]: a geometry defines the legal cuts; write one of"),
        (
            "cuts = [10, 20, 40, 12.5, 100]",
            'geometry = "mig-v100"',
            "devices[0].geometry: 'mig-v100' is unknown; use 'mig-a100-40gb' or 'mig-a100-80gb' or",
        ),
        ("cuts = [10", "cuts = [110", "devices[0].cuts: a share of 110 % must be above 0 and at most 100"),
        ("rate = 200", 'rate = "many"', "models[0].rate: found text in quotes; write a number"),
        (
            '"resnet50"',
            '"resnet"',
            "models[0].name: 'resnet' has no profile on 'v100'; measure one with `cotenant profile`, or correct the"
            " name: did you mean 'resnet50'?",
        ),
        ("rate = 200", "rate = 1e300", "models[0].rate: 1e+300 requests/s; write 0, or 1e-06 to"),
        (
            "rate = 200",
            "rate = 1e-300",
            "models[0].rate: 1e-300 requests/s; write 0, or 1e-06 to",
        ),
        ("[[models]]", "[models]", "models: found a single table where several are allowed; write its name in two"),
        ('["profiles.csv"]', '"profiles.csv"', "profiles: found text in quotes; write a list in brackets"),
        ("profiles =", "#", "key 'profiles' is missing"),
        (
            "cuts = [10, 20, 40, 12.5, 100]",
            "cuts = [0.2, 1]",
            "devices[0].cuts: the largest share is 1 %; shares are in",
        ),
        (
            "objective =",
            "model_repository =",
            "is a server's settings, not a problem: it has a model_repository; give it with --settings",
        ),
        ('["profiles.csv"]', '["profiles.csv", "profiles.csv"]', "profiles: 'resnet50' on 'v100' is in"),
        (
            "[[models]]",
            "[[models",
            "is not TOML: Expected ']]' at the end of an array declaration (at line 6, column 9)",
        ),
    ],
)
def test_read_problem_with_a_mistake_names_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, PROBLEM.replace(old, new, 1))
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}: {message}")):
        read_problem(path)


JOB = """
[[jobs]]
model = "resnet50"
name = "nightly"
batch = 1
priority = 5
memory = "2GiB"
steps = 1000
deadline = "90s"
"""


def test_read_problem_reads_best_effort_jobs_with_defaults(tmp_path: Path) -> None:
    nightly, plain = read_problem(written(tmp_path, PROBLEM + JOB + '[[jobs]]\nmodel = "resnet50"\n')).jobs
    assert nightly == BackgroundJob(
        name="nightly", model="resnet50", batch=1, priority=5, memory=2 << 30, steps=1000, deadline=90.0
    )
    assert plain == BackgroundJob(name="resnet50", model="resnet50")
    assert read_problem(written(tmp_path, PROBLEM)).jobs == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("priority = 5", "weight = 5", "jobs[0]: unknown key 'weight'; available: model, name, batch"),
        ('"resnet50"', '"resnet"', "jobs[0].model: 'resnet' has no profile on 'v100'; profile its steps as a model"),
        ("batch = 1", "batch = 512", "jobs[0].batch: 512 is more than was profiled of 'resnet50', up to"),
        ("priority = 5", "priority = 0", "jobs[0]: job 'nightly': a priority of 0 must be between 1 and 100"),
        ('"2GiB"', "2", "jobs[0].memory: '2' has no unit of memory"),
        ("steps = 1000", "steps = 0", "jobs[0]: job 'nightly': 0 steps must be at least 1"),
        ("steps = 1000", "", "jobs[0]: job 'nightly': a deadline is for a job that ends; give it steps"),
        ('"90s"', '"soon"', "jobs[0].deadline: 'soon' is not a quantity"),
        ('"nightly"', '""', "jobs[0].name: "),
        ("deadline", '[[jobs]]\nmodel = "resnet50"\nname = "nightly"\n#', "two entries for the job 'nightly'"),
    ],
)
def test_read_problem_with_a_mistake_in_a_job_names_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, PROBLEM + JOB.replace(old, new, 1))
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}: {message}")):
        read_problem(path)


def test_read_problem_with_a_geometry_sets_cuts_and_memory(tmp_path: Path) -> None:
    text = PROBLEM.replace("cuts = [10, 20, 40, 12.5, 100]", 'geometry = "mig-a100-40gb"')
    (kind,) = read_problem(written(tmp_path, text.replace('memory = "32GiB"', ""))).fleet
    assert (kind.geometry, kind.cuts) == ("mig-a100-40gb", (142, 285, 428, 571, 1000))
    assert kind.memory == round(39.25 * 2**30)
    (kind,) = read_problem(written(tmp_path, text)).fleet
    assert kind.memory == 32 << 30


def test_read_problem_with_devices_of_a_node_adds_the_network_to_their_kind(tmp_path: Path) -> None:
    text = PROBLEM + '[[devices]]\nkind = "node-a/v100"\ncount = 2\ncuts = [20, 100]\nnetwork = "0.5ms"\n'
    problem = read_problem(written(tmp_path, text.replace("count = 4", "count = 1").replace("200\n", "2000\n")))
    assert [kind.name for kind in problem.fleet] == ["v100", "node-a/v100"]
    here, there = (problem.profiles["resnet50", kind.name] for kind in problem.fleet)
    assert there.latency(1, 200) == pytest.approx(here.latency(1, 200) + 0.0005)
    plan = plan_problem(problem)
    assert {str(device.id) for device in plan.devices} >= {"node-a/v100-0", "node-a/v100-1"}
    assert check(plan, problem) == [] and type(plan).from_json(plan.to_json()).devices == plan.devices


def test_read_problem_with_unused_profiles_ignores_them(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "profiles.csv").write_text(PROFILE + "resnet50,a100,100,1,1.0,1420\nbert,v100,100,1,9.0,99\n")
    assert read_problem(path).fleet[0].name == "v100"


def test_read_problem_with_a_model_on_one_kind_only_is_accepted(tmp_path: Path) -> None:
    other = (
        '\n[[models]]\nname = "bert"\nslo = "50ms"\nrate = 0\n\n[[devices]]\nkind = "a100"\ncount = 1\nprice = 4.1\n'
    )
    path = written(tmp_path, PROBLEM + other)
    (tmp_path / "profiles.csv").write_text(PROFILE + "bert,a100,100,1,9.0,99\n")
    problem = read_problem(path)
    assert [(kind.name, kind.price) for kind in problem.fleet] == [("v100", 3.06), ("a100", 4.1)]
    plan = plan_problem(problem, "elastic", validate=False)
    assert check(plan, problem) == []
    assert {device.kind for device in plan.devices} == {"v100"}


def test_read_problem_with_an_infeasible_target_is_accepted(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, PROBLEM.replace("108ms", "2ms")))
    assert plan_problem(problem, "elastic", validate=False).unserved == {"resnet50": 200.0}


@pytest.mark.parametrize(
    "text", [PROFILE.replace("\n", "\r\n"), "\ufeff" + PROFILE, "\ufeff" + PROFILE.replace("\n", "\r\n")]
)
def test_read_profiles_file_of_other_systems_is_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(text.encode())
    assert read_profiles_file(path)["resnet50", "v100"].latency(1, 1000) == pytest.approx(0.0021)


def test_read_profiles_file_with_a_mistake_names_its_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "profiles.csv").write_text(PROFILE.replace("2.1,", "soon,"))
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path))}/profiles.csv:3: latency_ms: 'soon' is not a"):
        read_problem(path)
    (tmp_path / "profiles.csv").write_text("")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path))}/profiles.csv:1: column 'model' is missing"):
        read_problem(path)


def test_margin_slows_co_located_models(tmp_path: Path) -> None:
    path = written(tmp_path, PROBLEM.replace('"none"', '{ model = "margin", factor = 1.25 }', 1))
    interference = read_problem(path).interference
    load = Load("resnet50", "v100", 4, 500)
    assert (interference.slowdown(load, ()), interference.slowdown(load, (load,))) == (1.0, 1.25)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: cannot be read: No such file or directory$"):
        read_problem(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_profiles_file(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_settings(tmp_path)


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text("\ufeff" + PROBLEM, encoding="utf-8")
    (tmp_path / "profiles.csv").write_text("\ufeff" + PROFILE, encoding="utf-8")
    assert read_problem(path).rates == {"resnet50": 200.0}


APPLICATION = """
[[applications]]
name = "street"
slo = "300ms"
rate = 8

[[applications.stages]]
model = "resnet50"

[[applications.stages]]
name = "again"
model = "resnet50"
after = ["resnet50"]
fanout = { poisson = 1.5 }

[[applications.stages]]
name = "rare"
model = "resnet50"
after = ["resnet50"]
fanout = { counts = [0, 4], chances = [0.75, 0.25] }
"""
ONLY = PROBLEM.replace('[[models]]\nname = "resnet50"\nslo = "108ms"\nrate = 200\n', "")


def test_read_problem_with_applications_implies_their_models(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, ONLY + APPLICATION))
    (street,) = problem.applications
    assert (street.name, street.slo, street.attainment) == ("street", 0.3, 0.99)
    assert street.visits == {"resnet50": 1.0, "again": 1.5, "rare": 1.0}
    assert problem.rates == {"street": 8.0}
    assert problem.models == (Model(name="resnet50", slo=0.3),)
    assert not check(plan_problem(problem, "elastic", validate=False), problem)


def test_model_of_several_applications_has_their_shortest_target(tmp_path: Path) -> None:
    other = APPLICATION.replace("street", "alley").replace("300ms", "200ms")
    assert read_problem(written(tmp_path, ONLY + APPLICATION + other)).models == (Model(name="resnet50", slo=0.2),)


def test_model_of_an_application_may_have_its_own_entry(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, PROBLEM + APPLICATION))
    assert problem.models == (Model(name="resnet50", slo=0.108),)
    assert problem.rates == {"resnet50": 200.0, "street": 8.0}
    entry = '[[models]]\nname = "resnet50"\nmax_batch = 4\n'
    problem = read_problem(written(tmp_path, ONLY + entry + APPLICATION))
    assert problem.models == (Model(name="resnet50", slo=0.3, max_batch=4),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "street"', 'title = "street"', "applications[0]: unknown key 'title'; "),
        ('after = ["resnet50"]', 'behind = ["resnet50"]', "applications[0].stages[1]: unknown key 'behind'; "),
        ('slo = "300ms"', "slo = 300", "applications[0].slo: '300' has no unit of time"),
        ("rate = 8", "rate = -8", "applications[0].rate: -8 requests/s; a rate is finite and at least 0"),
        (
            'after = ["resnet50"]',
            'after = ["resnet"]',
            "applications[0]: application 'street': stage 'again' follows 'resnet', which is not one of its stages",
        ),
        (
            'after = ["resnet50"]',
            'after = ["again"]',
            "applications[0]: application 'street': its stages form a cycle: again after again",
        ),
        (
            'name = "again"',
            'name = "rare"',
            "applications[0]: application 'street': stage 'rare' is listed twice; give each a name of its own",
        ),
        (
            "{ poisson = 1.5 }",
            "{ poisson = 1.5, counts = [1] }",
            "applications[0].stages[1].fanout: write a number, or { poisson = 1.5 }, or { counts = [0, 1, 4], chances",
        ),
        (
            "{ poisson = 1.5 }",
            "-1",
            "applications[0]: application 'street': stage 'again': a fan-out of -1 must be 0 to 10000",
        ),
        (
            "{ poisson = 1.5 }",
            '"many"',
            "applications[0].stages[1].fanout: found text in quotes; write a whole number or a table",
        ),
        ('name = "street"', 'name = "resnet50"', "application 'resnet50': the name is taken; give it another"),
        (
            'model = "resnet50"',
            'model = "resnet5"',
            "applications[0]: stage 'resnet5': 'resnet5' has no profile on 'v100'; measure one with `cotenant profile`",
        ),
    ],
)
def test_read_problem_with_a_wrong_application_names_its_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = APPLICATION.replace(old, new, 1)
    if new == 'model = "resnet5"':
        text = text.replace('after = ["resnet50"]', 'after = ["resnet5"]')
    path = written(tmp_path, PROBLEM + text)
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}: {message}")):
        read_problem(path)


def test_example_of_applications_is_served() -> None:
    problem = read_problem(Path(__file__).parent.parent / "docs" / "examples" / "applications.toml")
    assert [application.name for application in problem.applications] == ["game", "traffic"]
    plan = plan_problem(problem, "elastic", validate=False)
    assert not plan.unserved
    assert not check(plan, problem)


def test_read_problem_without_models_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("no models; list [[models]], or [[applications]]")):
        read_problem(written(tmp_path, ONLY))
    with pytest.raises(ConfigError, match=re.escape("models[0]: 'resnet50' has no slo; give it a target")):
        read_problem(written(tmp_path, PROBLEM.replace('slo = "108ms"\n', "")))
