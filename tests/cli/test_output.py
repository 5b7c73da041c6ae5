from __future__ import annotations

from cotenant.cli.output import collect_results


def test_collect_results_in_any_order_are_sorted_by_number() -> None:
    assert collect_results("trying", [(2, "c"), (0, "a"), (1, "b")], 3) == ["a", "b", "c"]
