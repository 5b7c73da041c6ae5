"""The manifests that users install, read for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cotenant.k8s.client import ApiClient
from cotenant.k8s.resource import CUSTOM_RESOURCES

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
BASE = DEPLOY / "kustomize" / "base"
CHART = DEPLOY / "helm" / "cotenant"
DEFINITIONS = ("servedmodels.yaml", "devicepools.yaml")


def documents(path: Path) -> list[dict[str, Any]]:
    """All objects of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


async def install(client: ApiClient) -> None:
    """Define our resources on a server."""
    for name in DEFINITIONS:
        (definition,) = documents(BASE / name)
        await client.create(CUSTOM_RESOURCES, definition)
