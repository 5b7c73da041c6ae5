"""What distinguishes the runs of a characterisation from those that may not join them."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.errors import ConfigError
from cotenant.profiling.conditions import (
    Conditions,
    ModelConditions,
    differences,
    read_conditions,
    write_conditions,
)

MODEL = ModelConditions(slo=0.05, digest="abc")
BEFORE = Conditions(
    batch=8, seconds=2.0, loadgen=False, devices={"cpu": "Xeon, quotas"}, models={"a": MODEL, "left": MODEL}
)
OTHERS = {"a": msgspec.structs.replace(MODEL, slo=0.0501), "new": MODEL}


def found(served: tuple[str, ...] = (), **changed: object) -> list[str]:
    return list(differences(BEFORE, msgspec.structs.replace(BEFORE, **changed), served))


def test_differences_are_named_for_what_both_have() -> None:
    assert found() == []
    assert found(batch=4, seconds=0.5) == ["--batch 8, not 4", "--duration 2s, not 0.5s"]
    assert found(loadgen=True) == ["queries without --loadgen"]
    assert found(devices={"cpu": "EPYC, quotas", "v100": "MPS"}) == ["another cpu: Xeon, quotas"]
    assert found(models={"a": msgspec.structs.replace(MODEL, digest="def")}) == [
        "another file or configuration of model 'a'"
    ]


def test_slo_counts_for_models_that_ran_the_server_scenario() -> None:
    assert found(models=OTHERS) == []
    assert found(("a",), models=OTHERS) == ["an SLO of 0.05 s for model 'a', not 0.0501 s"]


def test_what_has_left_keeps_its_conditions() -> None:
    now = Conditions(batch=8, seconds=2.0, loadgen=False, devices={"v100": "MPS"}, models=OTHERS)
    merged = now.including(BEFORE)
    assert merged.models == {"left": MODEL, **OTHERS}
    assert set(merged.devices) == {"cpu", "v100"}
    assert now.including(None) == now


def test_conditions_are_read_back_as_they_were_written() -> None:
    assert read_conditions(write_conditions(BEFORE).encode(), "conditions.json") == BEFORE


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"batch": "8", "seconds": 2, "loadgen": false}'])
def test_files_that_are_no_conditions_are_refused_with_their_place(content: bytes) -> None:
    with pytest.raises(
        ConfigError, match=r"^out/conditions\.json: these are no conditions of `cotenant characterise`: "
    ):
        read_conditions(content, "out/conditions.json")
