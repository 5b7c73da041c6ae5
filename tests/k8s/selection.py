"""Select objects by labels and fields, and merge patches, as an API server does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]


def selector(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Return what a request selects: labels that are equal, unequal, there or not; fields that are equal."""
    labels = [term.strip() for term in query.get("labelSelector", "").split(",") if term.strip()]
    fields = [term.strip() for term in query.get("fieldSelector", "").split(",") if term.strip()]

    def chosen(each: Object) -> bool:
        has = each["metadata"].get("labels") or {}
        return all(_matches(term, has.get) for term in labels) and all(
            _matches(term, lambda path: _at(each, path) or "") for term in fields
        )

    return chosen


def _matches(term: str, value: Callable[[str], Any]) -> bool:
    if "!=" in term:
        name, _, wanted = term.partition("!=")
        return bool(value(name) != wanted)
    if "=" in term:
        name, wanted = term.replace("==", "=").split("=")
        return bool(value(name) == wanted)
    return value(term[1:]) is None if term.startswith("!") else value(term) is not None


def _at(each: Object, path: str) -> Any:
    value: Any = each
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def merged(before: Any, patch: Any) -> Any:
    """Merge as RFC 7386 does."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(before) if isinstance(before, dict) else {}
    for key, each in patch.items():
        if each is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), each)
    return made
