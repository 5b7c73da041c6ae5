from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from cotenant.control.adaptation import Solve, SolveStep
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.planning.solver_process import SolverProcess
from tests.live.deployment import CPU, profile


def problem(rate: float = 10.0, fleet: tuple[Kind, ...] = (CPU,)) -> Problem:
    return Problem(
        models=(Model(name="identity", slo=0.1),),
        rates={"identity": rate},
        fleet=fleet,
        profiles={("identity", "cpu"): profile("identity")},
    )


def asked(current: Plan, rate: float, number: int = 1) -> Solve:
    return Solve(number=number, rates={"identity": rate}, current=current, devices=tuple(d.id for d in current.devices))


def test_solver_process_answers_and_goes_on_with_another_problem() -> None:
    given = problem()
    current = plan_problem(given, validate=False)
    solver = SolverProcess("geometry")
    try:
        kept = solver(given, asked(current, 10.0))
        assert (kept.number, kept.step, kept.error) == (1, SolveStep.KEEP, "")
        pid = solver.pid
        anew = solver(problem(20.0), asked(current, 400.0, 2))
        assert anew.number == 2 and anew.plan is not None and anew.plan.rate("identity") >= 400.0
        assert solver.pid == pid
    finally:
        solver.close()
        solver.wait()
    assert solver.pid is None and pid is not None and not Path(f"/proc/{pid}").exists()


def test_solver_that_dies_is_replaced_and_its_death_is_the_answer() -> None:
    given = problem()
    current = plan_problem(given, validate=False)
    solver = SolverProcess("geometry")
    try:
        solver(given, asked(current, 10.0))
        assert solver.pid is not None
        os.kill(solver.pid, signal.SIGKILL)
        assert solver(given, asked(current, 10.0)).error == "the solver process died by SIGKILL, and was replaced"
        assert solver(given, asked(current, 10.0)).error == ""
    finally:
        solver.close()
        solver.wait()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(60)", "the solver did not answer within 0.3 s, and was replaced"),
        ("raise SystemExit(3)", "the solver process died with exit status 3, and was replaced"),
        ("import os; os.kill(os.getpid(), 40)", "the solver process died by signal 40, and was replaced"),
    ],
)
def test_solver_without_an_answer_says_why(program: str, reason: str) -> None:
    given = problem()
    limit = 0.3 if "sleep" in program else 60.0
    solver = SolverProcess("geometry", limit=limit, program=("-c", program))
    assert solver(given, asked(Plan(planner="none"), 1.0)).error == reason
    assert solver.pid is None


def test_solver_that_is_stopped_is_replaced_though_it_takes_no_question() -> None:
    """A question that is larger than what a pipe holds waits for who reads it."""
    many = msgspec.structs.replace(problem(), profiles={(f"m{n}", "cpu"): profile(f"m{n}") for n in range(2000)})
    solver = SolverProcess("geometry", limit=0.5, program=("-c", "import time; time.sleep(60)"))
    solver.start()
    assert solver.pid is not None
    os.kill(solver.pid, signal.SIGSTOP)
    answer = solver(many, asked(Plan(planner="none"), 1.0))
    assert answer.error == "the solver did not answer within 0.5 s, and was replaced"
    assert solver.pid is None


def test_error_of_a_planner_is_the_answer() -> None:
    solver = SolverProcess("nobody")
    given = problem()
    try:
        answer = solver(given, asked(plan_problem(given, validate=False), 4000.0))
        assert answer.plan is None and "nobody" in answer.error
    finally:
        solver.close()
        solver.wait()


def test_closed_solver_answers_at_once() -> None:
    solver = SolverProcess("geometry", program=("-c", "import time; time.sleep(60)"))
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(solver(problem(), asked(Plan(planner="none"), 1.0)).error))
    thread.start()
    while solver.pid is None:
        pass
    solver.close()
    thread.join(30.0)
    assert answers == ["the solver process died by SIGKILL, and was replaced"]
    assert solver(problem(), asked(Plan(planner="none"), 1.0)).error == "the server stops"


def test_problem_that_cannot_be_sent_is_the_answer() -> None:
    given = msgspec.structs.replace(problem(), interference=lambda: None)
    solver = SolverProcess("geometry", program=("-c", "import time; time.sleep(60)"))
    assert "the solver could not be asked: " in solver(given, asked(Plan(planner="none"), 1.0)).error
    assert solver.pid is None
