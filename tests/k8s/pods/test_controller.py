"""The controller against an API server's double: every pod gets one share, whatever fails on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.errors import KubernetesError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.elector import Elector
from cotenant.k8s.pods.controller import ShareController
from cotenant.k8s.pods.objects import CONDITION, config_map_for, environment_of, read_held
from cotenant.k8s.pods.placer import Placer
from cotenant.k8s.pods.request import CONFIG_MAP, GATE, PLACEMENT, SharePod, read_placement, read_pod
from cotenant.k8s.pods.rules import choose_rule
from cotenant.planners.cluster import fits
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play
from tests.k8s.pods.cluster import MIG, SMALL, catalogue, device, instances, node_object, pod_object
from tests.k8s.pods.test_request import PLACED


def cluster(api: ApiDouble) -> None:
    api.put("nodes", node_object("n1", device("GPU-1a"), device("GPU-1b")))
    api.put("nodes", node_object("n2", device("GPU-2", SMALL)))


@asynccontextmanager
async def controlling(
    client: ApiClient, rule: str = "score", kinds: Any = (), name: str = ""
) -> AsyncIterator[ShareController]:
    """A controller; with a name, one that takes part in an election."""

    def elect(changed: Callable[[], None]) -> Elector:
        # A lease that is looked at often, and that no busy machine lets run out: what it is taken by is its release.
        return Elector(client, "shares", name, 1.0, changed, clock=lambda: time.monotonic() / 60)

    controller = ShareController(client, Placer(catalogue(*kinds), choose_rule(rule)), elect if name else None)
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, KubernetesError):  # any other error is one of the controller
            await task


async def decide_again(controller: ShareController) -> bool:
    """Decide and write once more, when what the controller itself is writing is written."""
    async with controller.deciding:
        return await controller.reconcile()


def pods(api: ApiDouble) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in api.objects("pods")}


def placement_of(pod: dict[str, Any]) -> Any:
    return read_placement((pod["metadata"].get("annotations") or {}).get(PLACEMENT))


def is_open(pod: dict[str, Any]) -> bool:
    return not pod["spec"].get("schedulingGates")


def message(pod: dict[str, Any]) -> str:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((f"{each['reason']}: {each['message']}" for each in conditions if each["type"] == CONDITION), "")


def whole(api: ApiDouble, *names: str) -> bool:
    """Whether these pods have their shares, and ConfigMaps that say the same."""
    maps = {each["metadata"]["name"]: each for each in api.objects("configmaps")}
    found = pods(api)
    return all(
        is_open(found[name])
        and (placed := placement_of(found[name])) is not None
        and name in maps
        and maps[name]["data"] == environment_of(placed)
        for name in names
    )


def test_waiting_pods_get_shares_and_then_nothing_is_written() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        for name in "abc":
            api.put("pods", pod_object(name, "tiny", "100ms", "20"))
        async with controlling(client) as controller:
            await eventually(lambda: whole(api, "a", "b", "c"))
            assert all(
                (each["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"])
                for each in pods(api).values()
            )
            await eventually(lambda: len(controller.pods()) == 3 and all(p.placement for p in controller.pods()))  # type: ignore[union-attr]
            before = list(api.writes)
            for _ in range(3):
                assert await decide_again(controller)
            assert api.writes == before and len(before) == 6  # two for each pod
            api.put("pods", pod_object("d", "tiny", "100ms", "20"))
            await eventually(lambda: whole(api, "d"))

    play(scenario)


def test_pods_without_room_are_told_once_and_placed_when_there_is() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1"))
        api.put("pods", pod_object("p"))
        async with controlling(client) as controller:
            await eventually(lambda: "no node reports a device" in message(pods(api)["p"]))
            await eventually(lambda: CONDITION in str(controller._pods.objects))  # it has seen its own write
            before = len(api.writes)
            await decide_again(controller)
            await asyncio.sleep(0.1)
            assert len(api.writes) == before
            cluster(api)
            await eventually(lambda: whole(api, "p"))

    play(scenario)


def test_pods_that_wait_are_not_written_when_others_are_placed() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0")))
        api.put("pods", pod_object("first", "mid", "100ms", "50"))
        async with controlling(client) as controller:
            await eventually(lambda: whole(api, "first"))
            for n in range(3):
                api.put("pods", pod_object(f"large-{n}", "large", "200ms", "40"))
            await eventually(lambda: sum(message(each).startswith("NoRoom") for each in pods(api).values()) == 3)
            waiting = {name: each for name, each in pods(api).items() if not is_open(each)}
            for n in range(2):
                api.put("pods", pod_object(f"tiny-{n}", "tiny", "300ms", "2"))
                await eventually(lambda n=n: whole(api, f"tiny-{n}"))
            assert await decide_again(controller)
            assert {name: each for name, each in pods(api).items() if name in waiting} == waiting

    play(scenario)


def test_pods_that_ask_wrongly_are_told() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("pods", pod_object("p", "mid", "fast"))
        api.put("pods", pod_object("q"))
        async with controlling(client):
            await eventually(lambda: message(pods(api)["p"]).startswith("Invalid: cotenant.dev/slo: 'fast'"))
            await eventually(lambda: whole(api, "q"))
            assert not is_open(pods(api)["p"])

    play(scenario)


def test_half_done_write_is_finished_with_what_was_written_down() -> None:
    """The former controller wrote the ConfigMap, and died."""

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        read = read_pod(api.put("pods", pod_object("p")))
        assert isinstance(read, SharePod)
        was = msgspec.structs.replace(PLACED, node="n2", device="GPU-2", visible="GPU-2", slot=0, share=950)
        body = config_map_for(read, was, None)
        assert body is not None
        api.put("configmaps", body)
        async with controlling(client):
            await eventually(lambda: whole(api, "p"))
            assert placement_of(pods(api)["p"]) == was
            assert api.writes == ["PATCH /api/v1/namespaces/default/pods/p"]

    play(scenario)


def test_restart_leaves_placed_pods_as_they_are() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        for name in "ab":
            api.put("pods", pod_object(name, "tiny", "100ms", "20"))
        async with controlling(client):
            await eventually(lambda: whole(api, "a", "b"))
        before, writes = pods(api), len(api.writes)
        api.put("pods", pod_object("c", "tiny", "100ms", "20"))
        async with controlling(client, "hetsev"):
            await eventually(lambda: whole(api, "c"))
        after = pods(api)
        assert {name: after[name] for name in "ab"} == before and len(api.writes) == writes + 2

    play(scenario)


def test_api_server_that_fails_for_a_while_costs_nothing_but_time() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        async with controlling(client) as controller:
            await eventually(lambda: len(controller.nodes()) == 2)
            with api.failing(500, "PATCH /api/v1/namespaces/default/pods"):
                for name in "abcd":
                    api.put("pods", pod_object(name, "tiny", "100ms", "20"))
                await eventually(lambda: api.objects("configmaps"))
                assert not any(is_open(each) for each in pods(api).values())
            await eventually(lambda: whole(api, *"abcd"))

    play(scenario)


def test_conflicts_are_decided_again() -> None:
    """Somebody else keeps changing the pods while they are written."""

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        for name in "ab":
            api.put("pods", pod_object(name, "tiny", "100ms", "20"))
        async with controlling(client):
            for number in range(20):
                for name, body in pods(api).items():
                    body["metadata"].setdefault("labels", {})["changed"] = str(number)
                    if not is_open(body):
                        api.put("pods", body)
                        assert name in "ab"
                await asyncio.sleep(0.01)
            await eventually(lambda: whole(api, "a", "b"))

    play(scenario)


def test_pod_that_ends_leaves_its_share_to_the_next() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0")))
        api.put("pods", pod_object("a", "large", "300ms", "20"))
        async with controlling(client, "max"):
            await eventually(lambda: whole(api, "a"))
            given = placement_of(pods(api)["a"])
            api.put("pods", pod_object("b", "large", "300ms", "20"))
            await eventually(lambda: message(pods(api)["b"]).startswith("NoRoom"))
            api.remove("pods", "a", "default")
            await eventually(lambda: whole(api, "b"))
            assert placement_of(pods(api)["b"]) == given

    play(scenario)


def test_config_map_that_is_gone_is_written_again() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("pods", pod_object("p"))
        async with controlling(client) as controller:
            await eventually(lambda: whole(api, "p"))
            await eventually(lambda: not controller._given)
            given = placement_of(pods(api)["p"])
            api.remove("configmaps", "p", "default")
            await eventually(lambda: whole(api, "p"))
            assert placement_of(pods(api)["p"]) == given

    play(scenario)


def test_config_map_of_somebody_else_is_left_alone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        theirs = {"metadata": {"name": "p", "namespace": "default"}, "data": {"mine": "1"}}
        api.put("configmaps", theirs)
        api.put("pods", pod_object("p"))
        async with controlling(client):
            await eventually(lambda: "ConfigMap 'p' is somebody else's" in message(pods(api)["p"]))
            assert api.objects("configmaps")[0]["data"] == {"mine": "1"} and not is_open(pods(api)["p"])

    play(scenario)


def test_pods_of_a_deployment_share_a_config_map_that_forgets_who_is_gone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        for name in ("web-a", "web-b"):
            api.put("pods", pod_object(name, "tiny", "100ms", "20", annotations={CONFIG_MAP: "web"}))

        def held() -> set[str]:
            return {name for each in api.objects("configmaps") for name in read_held(each)}

        async with controlling(client):
            await eventually(lambda: held() == {"web-a", "web-b"} and all(map(is_open, pods(api).values())))
            api.remove("pods", "web-a", "default")
            await eventually(lambda: held() == {"web-b"})
            assert set(api.objects("configmaps")[0]["data"]) == {"web-b.env"}

    play(scenario)


def test_pod_waits_for_the_cut_of_an_idle_gpu() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0", MIG, mig=True, recut=True)))
        api.put("pods", pod_object("p", "mid", "300ms", "20"))
        async with controlling(client, "min", (MIG,)):
            await eventually(lambda: message(pods(api)["p"]).startswith("WaitsForCut: GPU-0 on n1 is being cut into"))
            assert '"GPU-0":[142,142' in api.objects("nodes")[0]["metadata"]["annotations"]["cotenant.dev/cuts"]
            made = instances(*["1g.10gb"] * 7)
            api.put("nodes", node_object("n1", device("GPU-0", MIG, mig=True, recut=True, instances=made)))
            await eventually(lambda: whole(api, "p"))
            assert placement_of(pods(api)["p"]).visible == made[0].uuid

    play(scenario)


def test_one_of_two_gives_shares_and_the_other_takes_over() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        async with controlling(client, name="second") as second:
            async with controlling(client, name="first") as first:
                await eventually(lambda: first.leads or second.leads)
                api.put("pods", pod_object("a", "tiny", "100ms", "20"))
                await eventually(lambda: whole(api, "a"))
                assert first.leads != second.leads and len([each for each in api.writes if "/pods/" in each]) == 1
            api.put("pods", pod_object("b", "tiny", "100ms", "20"))
            await eventually(lambda: whole(api, "b"))
            assert second.leads

    play(scenario)


def test_gates_of_others_stay() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        body = pod_object("p")
        body["spec"]["schedulingGates"] = [{"name": "other/gate"}, {"name": GATE}]
        api.put("pods", body)
        async with controlling(client):
            await eventually(lambda: placement_of(pods(api)["p"]) is not None)
            assert pods(api)["p"]["spec"]["schedulingGates"] == [{"name": "other/gate"}]

    play(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_fails_each_pod_gets_one_share_and_no_device_is_given_twice(seed: int) -> None:
    """Writes are refused at random, watches break, controllers are killed, pods come and go."""
    rng = np.random.default_rng(seed)

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        expected: set[str] = set()
        for number in range(12):
            async with controlling(client, "score" if number % 2 else "hetsev"):
                for _ in range(2):
                    name = f"p{number}-{len(expected)}"
                    api.put("pods", pod_object(name, str(rng.choice(["tiny", "mid"])), "300ms", "5"))
                    expected.add(name)
                fault = rng.choice(["PATCH", "POST", "PUT", "GET", "none"])
                with api.failing(int(rng.choice([409, 500])), str(fault)):
                    await asyncio.sleep(float(rng.uniform(0, 0.1)))
                if rng.random() < 0.3:
                    api.break_watches()
                if expected and rng.random() < 0.3:
                    gone = sorted(expected)[int(rng.integers(len(expected)))]
                    expected.remove(gone)
                    api.remove("pods", gone, "default")
                await asyncio.sleep(float(rng.uniform(0, 0.1)))
        machine = Placer(catalogue(), choose_rule("score"))
        async with controlling(client) as controller:

            def settled() -> bool:
                found = pods(api)
                told = [name for name in expected if "NoRoom" in message(found[name]) and not is_open(found[name])]
                return whole(api, *(expected - set(told)))

            await eventually(settled, 30)
            nodes = controller.nodes()
        placed = [placement_of(each) for each in pods(api).values() if placement_of(each) is not None]
        assert len(placed) >= 5
        for each in machine.devices(nodes, placed):
            assert fits(machine._catalogue.problem(), each.slots.draft)
            numbers = [share.slot for share in placed if share.device == each.report.uuid]
            assert len(numbers) == len(set(numbers))

    play(scenario, 120)


def test_error_that_is_nobodys_ends_the_controller_that_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)

        def broken(*arguments: object) -> None:
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(Placer, "decide", broken)
        elector = lambda changed: Elector(client, "shares", "a", 1.0, changed)  # noqa: E731
        controller = ShareController(client, Placer(catalogue(), choose_rule("score")), elector)
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await asyncio.wait_for(controller.run(), 60)

    play(scenario)


def test_pod_whose_share_the_api_server_refuses_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("pods", pod_object("a", "tiny", "100ms", "20", annotations={CONFIG_MAP: "No_Name"}))
        api.put("pods", pod_object("b", "tiny", "100ms", "20"))
        with api.failing(422, "POST /api/v1/namespaces/default/configmaps"):
            async with controlling(client):
                await eventually(lambda: "refused (422)" in message(pods(api)["b"]))
                assert "refused (422)" in message(pods(api)["a"])  # the older one, and both were tried
                await eventually(lambda: "refused (422)" in caplog.text)  # it is logged after both were told
        async with controlling(client):
            await eventually(lambda: whole(api, "b"))
        assert caplog.text.count("refused (422)") == 1

    play(scenario)
