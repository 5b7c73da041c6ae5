"""What an API server refuses is what the reader refuses, and what it admits can be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.k8s.specs import read_device_pools, read_served_models
from tests.k8s.manifests import BASE, documents
from tests.k8s.schema import admitted


def schema(name: str) -> dict[str, Any]:
    (definition,) = documents(BASE / name)
    found: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


MODEL, POOL = schema("servedmodels.yaml"), schema("devicepools.yaml")

GOOD: list[dict[str, Any]] = [
    {},
    {"model": "ResNet_50.v2"},
    *({"slo": slo} for slo in ("50ms", "1.5s", "0.5s", ".5s", "100us", "2m", "1h", "10min", "005ms")),
    *({"attainment": each} for each in ("99%", "99.95%", "100%", "100.0%", "50%", "1%", "0.1%", ".5%", "90.5%", "09%")),
    {"rate": 0},
    {"rate": 0.5},
    {"maxBatch": 1},
    {"maxQueueDelay": "0ms"},
    {"priority": 3},
]
BAD: list[dict[str, Any]] = [
    *({"slo": slo} for slo in ("", "50", "0ms", "0.0s", "-5ms", "5 ms", "5d", "1e3ms", "ms", 50)),
    *({"attainment": each} for each in ("0%", "0.0%", "101%", "100.5%", "99", "-1%", "%", 99, "00%")),
    {"model": ""},
    {"model": "a/b"},
    {"rate": -1},
    {"rate": 1e8},
    {"rate": "20"},
    {"maxBatch": 0},
    {"maxBatch": 1.5},
    {"maxQueueDelay": "5"},
    {"priority": 0},
]


@pytest.mark.parametrize("spec", GOOD, ids=str)
def test_good_model_is_admitted_and_read(spec: dict[str, Any]) -> None:
    stored, errors = admitted({"spec": spec}, MODEL)
    assert errors == []
    (found,) = read_served_models([{"metadata": {"name": "a"}, **stored}])
    assert found.error == ""


@pytest.mark.parametrize("spec", BAD, ids=str)
def test_bad_model_is_refused(spec: dict[str, Any]) -> None:
    assert admitted({"spec": spec}, MODEL)[1]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"kind": ""},
        {"kind": "a/b"},
        {"kind": "cpu", "limit": -1},
        {"kind": "cpu", "limit": 0.5},
        {"kind": "cpu", "pricePerHour": -0.1},
        {"kind": "cpu", "cuts": []},
        {"kind": "cpu", "cuts": [0]},
        {"kind": "cpu", "cuts": [101]},
        {"kind": "cpu", "sharing": ["threads"]},
    ],
    ids=str,
)
def test_bad_pool_is_refused(spec: dict[str, Any]) -> None:
    assert admitted({"spec": spec}, POOL)[1]


numbers = st.from_regex(r"\A[0-9]{0,6}(\.[0-9]{0,6})?\Z")


@given(numbers, st.sampled_from(["us", "ms", "s", "min", "m", "h"]), numbers)
def test_quantity_that_is_admitted_can_be_read(time: str, unit: str, percent: str) -> None:
    spec = {"slo": time + unit, "attainment": percent + "%", "maxQueueDelay": time + unit}
    for key, value in spec.items():
        stored, errors = admitted({"spec": {key: value}}, MODEL)
        (found,) = read_served_models([{"metadata": {"name": "a"}, **stored}])
        if not errors:
            assert found.error == "" or "out of range" in found.error, (key, value)


@given(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["cpu", "h100"])},
        optional={
            "limit": st.integers(0, 1_000_000),
            "pricePerHour": st.floats(0, 1e9),
            "cuts": st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
        },
    )
)
def test_pool_that_is_admitted_can_be_read(spec: dict[str, Any]) -> None:
    stored, errors = admitted({"spec": spec}, POOL)
    assert errors == []
    (found,) = read_device_pools([{"metadata": {"name": "a"}, **stored}])
    assert found.error == "" or "the largest share is 1 %" in found.error


def test_fields_that_are_unknown_are_pruned_and_defaults_filled_in() -> None:
    stored, errors = admitted({"spec": {"slo": "5ms", "sol": "1s"}}, MODEL)
    assert (stored, errors) == ({"spec": {"slo": "5ms", "attainment": "99%", "priority": 1}}, [])
