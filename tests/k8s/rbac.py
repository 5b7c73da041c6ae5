"""Say what a Role allows of the requests that an API server was asked."""

from __future__ import annotations

from typing import Any

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def rule_for(role: dict[str, Any], request: str) -> int | None:
    """Return the number of the rule that allows a request, such as ``GET /api/v1/namespaces/a/pods``; None: none does.
    A watch has ``?watch=true`` behind it."""
    method, address = request.split()
    path, _, watch = address.partition("?")
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    if rest[0] == "namespaces":
        rest = rest[2:]
    name = rest[1] if len(rest) > 1 else None
    resource = "/".join([rest[0], *rest[2:]])
    verb = VERBS[method]
    if method == "GET" and name is None:
        verb = "watch" if watch else "list"
    for number, rule in enumerate(role["rules"]):
        named = rule.get("resourceNames")
        if (
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (named is None or name in named)
        ):
            return number
    return None
