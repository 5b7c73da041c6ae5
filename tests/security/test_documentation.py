"""Each class of vulnerabilities that docs/security.md lists has the tests that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "security.md"
CLASSES = {
    *("pickled sockets", "code in model files", "traversal and links", "missing authorisation", "CSRF and rebinding"),
    *("chunked bodies", "quadratic parsing", "integer overflow and giant shapes", "deep recursion", "shared memory"),
    *("double ends on cancel", "smuggling", "header bytes 0x80 to 0xFF", "HTTP/2 resets", "fetched URLs", "pipelining"),
    "jobs without authentication",
}


def test_each_class_has_the_tests_that_the_page_names() -> None:
    table = PAGE.read_text().partition("A named test for each class:")[2]
    rows = dict(re.findall(r"^\| ([^|]+) \| (`test_[^|]+) \|$", table, re.MULTILINE))
    assert rows.keys() == CLASSES
    for tests in rows.values():
        for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", tests):
            functions = [
                node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)
            ]
            assert name in functions, f"{file} has no {name}"
        assert tests.count("`") == 2 * tests.count("::")
