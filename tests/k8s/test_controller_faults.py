"""A front end that follows a cluster does no harm where it leads no more, and hides no fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cotenant.config import Settings
from cotenant.k8s.controller import combined
from cotenant.k8s.desired_state import DesiredState
from cotenant.k8s.resource import ENDPOINT_SLICES, SERVED_MODELS
from tests.k8s.eventually import eventually
from tests.k8s.front_end import becomes, conditions, front_end
from tests.k8s.servers import ApiServer, double_server

IDENTITY = {"metadata": {"name": "identity"}, "spec": {"slo": "5s", "rate": 20}}


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.controller.PERIOD", 0.3)


def play_double(scenario: Callable[[ApiServer], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(180), double_server(folder) as api:
            await scenario(api)

    asyncio.run(run())


def test_front_end_that_leads_no_more_leaves_the_service_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.k8s.controller.ADVERTISE_SECONDS", 0.0)

    async def scenario(api: ApiServer) -> None:
        double = api.double
        assert double is not None

        def leads_to() -> list[str]:
            return [each for one in double.objects("endpointslices") for each in one["endpoints"][0]["addresses"]]

        await api.client.create(SERVED_MODELS, IDENTITY)
        here = 'service = "models"\naddress = "10.0.0.7"\n'
        async with front_end(api, tmp_path, kubernetes=here):
            await eventually(lambda: leads_to() == ["10.0.0.7"])
            with double.slow(4.0):  # longer than the lease, which cannot be renewed
                before = len(double.requests)
                double.put(
                    "endpointslices",
                    {
                        "metadata": {"name": "models", "namespace": "default"},
                        "endpoints": [{"addresses": ["10.0.0.8"]}],
                    },
                )
                path = ENDPOINT_SLICES.path("default", "models")
                await eventually(lambda: f"GET {path}" in double.requests[before:])
                await asyncio.sleep(6.0)
                assert f"PUT {path}" not in double.requests[before:]
                assert leads_to() == ["10.0.0.8"]

    play_double(scenario, tmp_path)


def test_status_that_the_api_server_refuses_keeps_back_no_other(tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        assert api.double is not None
        await api.client.create(SERVED_MODELS, {"metadata": {"name": "aged"}, "spec": {"model": "lookup"}})
        await api.client.create(SERVED_MODELS, IDENTITY)
        with api.double.failing(422, only="servedmodels/aged/status"):
            async with front_end(api, tmp_path):
                await becomes(api, "identity", "True", "Serving")
                assert await conditions(api, "aged") == {}

    play_double(scenario, tmp_path)


def test_fault_of_the_program_in_a_rollout_ends_the_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(base: Settings, state: DesiredState) -> Settings:
        if any(model.name == "lookup" for model in state.models):
            raise RuntimeError("a fault")
        return combined(base, state)

    monkeypatch.setattr("cotenant.k8s.controller.combined", broken)

    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        async with front_end(api, tmp_path):
            await becomes(api, "identity", "True", "Serving")
            await api.client.create(SERVED_MODELS, {"metadata": {"name": "lookup"}})
            await asyncio.sleep(60.0)

    with pytest.raises(RuntimeError, match="a fault"):
        play_double(scenario, tmp_path)
