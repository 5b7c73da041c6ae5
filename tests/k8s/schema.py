"""Do with an object what an API server does by a structural schema: prune, fill in defaults, validate."""

from __future__ import annotations

import copy
from typing import Any

from jsonschema import Draft4Validator

# A schema of OpenAPI 3.0, as far as CustomResourceDefinitions have it, is one of JSON Schema's draft 4 and `nullable`.


def admitted(value: Any, schema: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return what is stored of a value, and what is wrong with it."""
    value = _defaulted(_pruned(copy.deepcopy(value), schema), schema)
    errors = []
    for error in Draft4Validator(_draft4(schema)).iter_errors(value):
        place = ".".join(str(part) for part in error.absolute_path)
        errors.append(f"{place}: {error.message}")
    return value, sorted(errors)


def _pruned(value: Any, schema: dict[str, Any]) -> Any:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and schema.get("type") == "object":
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        if others is not None:
            return {key: _pruned(each, others if isinstance(others, dict) else {}) for key, each in value.items()}
        return {key: _pruned(each, known[key]) for key, each in value.items() if key in known}
    if isinstance(value, list) and "items" in schema:
        return [_pruned(each, schema["items"]) for each in value]
    return value


def _defaulted(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        for key, each in schema.get("properties", {}).items():
            if key not in value and "default" in each:
                value[key] = copy.deepcopy(each["default"])
            if key in value:
                value[key] = _defaulted(value[key], each)
    if isinstance(value, list):
        return [_defaulted(each, schema.get("items", {})) for each in value]
    return value


def _draft4(schema: dict[str, Any]) -> dict[str, Any]:
    made = {key: each for key, each in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "properties" in made:
        made["properties"] = {key: _draft4(each) for key, each in made["properties"].items()}
    for key in ("items", "additionalProperties", "not"):
        if isinstance(made.get(key), dict):
            made[key] = _draft4(made[key])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in made:
            made[key] = [_draft4(each) for each in made[key]]
    return made
