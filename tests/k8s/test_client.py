"""What the client says of servers that refuse, stumble and lie, and where it finds them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cotenant.errors import ConfigError, KubernetesError
from cotenant.k8s.client import ApiClient, WatchEvent, connected
from cotenant.k8s.resource import CONFIG_MAPS, PODS, SERVED_MODELS, ObjectKey
from tests.k8s.api_double import ApiDouble, api_double
from tests.k8s.eventually import eventually
from tests.k8s.play import play

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: c, user: u, namespace: models}}}}]
clusters: [{{name: c, cluster: {{server: {server}}}}}]
users: [{{name: u, user: {{token: secret}}}}]
"""


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"metadata": {"name": name}, "data": data}


def test_paths_of_resources() -> None:
    assert PODS.path("models", "a", "binding") == "/api/v1/namespaces/models/pods/a/binding"
    assert SERVED_MODELS.path() == "/apis/cotenant.dev/v1alpha1/servedmodels"


def test_long_list_is_read_page_by_page_from_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.client.LIST_PAGE", 3)

    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        for i in range(8):
            await client.create(CONFIG_MAPS, config_map(f"m{i}"))
        return await client.list(CONFIG_MAPS), api.requests

    listing, requests = play(scenario)
    assert [each["metadata"]["name"] for each in listing.objects] == [f"m{i}" for i in range(8)]
    assert requests.count("GET /api/v1/namespaces/default/configmaps") == 3


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [
        (500, "", "GET /api/v1/namespaces/default/configmaps/a is refused (500): as the test wants it"),
        (502, "<html>bad gateway", "GET /api/v1/namespaces/default/configmaps/a is refused (502): <html>bad gateway"),
        (403, " ", "GET /api/v1/namespaces/default/configmaps/a is refused (403): no reason is given"),
        (200, "[1]", "the API server answers /api/v1/namespaces/default/configmaps/a with what is not an object"),
    ],
)
def test_answer_that_is_no_object_is_an_error_with_its_status(code: int, text: str, message: str) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        with api.failing(code, text=text), pytest.raises(KubernetesError) as raised:
            await client.get(CONFIG_MAPS, "a")
        return raised.value

    error = play(scenario)
    assert str(error).startswith(message)
    assert error.status == (code if code != 200 else 0)


def test_server_that_is_away_is_an_error_of_status_0() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        await client.list(CONFIG_MAPS)
        with api.away(), pytest.raises(KubernetesError, match="does not answer") as raised:
            await client.list(CONFIG_MAPS)
        await client.list(CONFIG_MAPS)
        return raised.value.status

    assert play(scenario) == 0


async def end_of(watch: AsyncIterator[WatchEvent]) -> KubernetesError:
    """Return the error that a watch ends in."""
    try:
        async for _ in watch:
            pass
    except KubernetesError as error:
        return error
    raise AssertionError("it ended without an error")


def test_watch_of_a_forgotten_version_is_gone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        version = (await client.list(CONFIG_MAPS)).version
        await client.create(CONFIG_MAPS, config_map("a"))
        api.compact()
        return (await end_of(client.watch(CONFIG_MAPS, version))).status

    assert play(scenario) == 410


def test_version_that_is_forgotten_during_a_watch_is_gone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        version = (await client.list(CONFIG_MAPS)).version
        with api.silent():
            ending = asyncio.create_task(end_of(client.watch(CONFIG_MAPS, version)))
            await eventually(lambda: len(api.requests) == 2)
            await client.create(CONFIG_MAPS, config_map("a"))
            api.compact()
        return (await ending).status

    assert play(scenario) == 410


def test_watch_that_is_cut_off_ends_in_an_error() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        version = (await client.list(CONFIG_MAPS)).version
        watch = client.watch(CONFIG_MAPS, version)
        first = asyncio.ensure_future(anext(watch))
        await eventually(lambda: len(api.requests) == 2)
        await client.create(CONFIG_MAPS, config_map("a"))
        assert (await first).type == "ADDED"
        api.break_watches()
        return await end_of(watch)

    error = play(scenario)
    assert "does not answer" in str(error)
    assert error.status == 0


def test_watch_that_falls_silent_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.client.SILENCE", -0.7)

    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        version = (await client.list(CONFIG_MAPS)).version
        with api.silent(), pytest.raises(KubernetesError, match="ReadTimeout"):
            async for _ in client.watch(CONFIG_MAPS, version, seconds=1):
                pass

    play(scenario)


def test_delete_of_what_is_not_there_is_harmless() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> Any:
        await client.delete(CONFIG_MAPS, ObjectKey("default", "none"))

    play(scenario)


def test_kubeconfig_gives_address_namespace_and_token(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with api_double() as api:
            path = tmp_path / "config"
            path.write_text(KUBECONFIG.format(server=api.url))
            async with connected(kubeconfig=path) as client:
                await client.list(CONFIG_MAPS)
            return api.requests

    assert asyncio.run(run()) == ["GET /api/v1/namespaces/models/configmaps"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no API server of Kubernetes to ask: .* not found; run in a cluster, or name a file with KUBECONFIG"),
        ("{", "is not YAML"),
        ("[]", "is not a configuration of a Kubernetes client"),
        ("clusters: []\ncontexts: []", "no API server of Kubernetes to ask: No current context set"),
        (KUBECONFIG.format(server="https://x").replace("server", "servers: [", 1), "is not YAML"),
        (
            KUBECONFIG.format(server="https://x}, certificate-authority: /nowhere").replace("}}", "}"),
            "is not YAML|cannot be used",
        ),
    ],
)
def test_configuration_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)

    async def run() -> None:
        async with connected(kubeconfig=path):
            pass

    with pytest.raises(ConfigError, match=message):
        asyncio.run(run())


@pytest.mark.parametrize("answer", ["secret", "{}", '{"status": {}}', "[]"])
def test_plugin_that_gives_no_token_is_told_without_what_it_said(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "config"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "echo", "args": [answer]}
    configuration = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"exec": plugin}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(configuration))

    async def run() -> None:
        async with connected(kubeconfig=path) as client:
            await client.list(CONFIG_MAPS)

    with pytest.raises(KubernetesError, match=r"its plugin's answer is not an ExecCredential with a token$") as raised:
        asyncio.run(run())
    assert raised.value.status == 0


def test_without_lightkube_the_error_names_the_extra(tmp_path: Path) -> None:
    script = """
import asyncio, sys
sys.modules["lightkube"] = None
from cotenant.errors import ConfigError
from cotenant.k8s.client import ApiClient, WatchEvent, connected
async def run():
    async with connected(): pass
try: asyncio.run(run())
except ConfigError as error: print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "pip install 'cotenant[k8s]'" in ran.stdout
    assert json.dumps(ran.stderr) == '""'
