"""`cotenant share-controller`: what it refuses. What it does: tests/k8s/pods."""

from __future__ import annotations

from pathlib import Path

from tests.cli.program import Program
from tests.k8s.pods.test_command import write_problem


def test_authority_that_cannot_be_read_is_refused(program: Program, folder: Path) -> None:
    asked = ("share-controller", str(write_problem(folder)), "--recommender", "127.0.0.1:1", "--ca-file", "none.pem")
    assert program.refuses(*asked) == "none.pem: cannot be read: No such file or directory"


def test_token_is_not_sent_in_the_clear(program: Program, folder: Path) -> None:
    (folder / "token").write_text("a-token-of-a-test\n")
    asked = ("share-controller", str(write_problem(folder)), "--token-file", "token", "--recommender")
    said = "a token is not sent unencrypted over a network; name who signed its certificate with --ca-file"
    assert program.refuses(*asked, "recommender:9003") == f"--recommender: 'recommender:9003': {said}"
