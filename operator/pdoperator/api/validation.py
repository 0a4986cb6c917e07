"""What the API server would say to a manifest, without one: schema, defaults and CEL rules.

For `pdcluster preflight` and the webhook. Built on the same schema and declarations as the CRD, and tested against a
real API server.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pdoperator.api import names
from pdoperator.api.cel import RULES
from pdoperator.api.crd import object_schema
from pdoperator.api.structural import problems

_SCHEMA = object_schema()


def with_defaults(value: Any, schema: dict[str, Any] | None = None) -> Any:
    """A copy of a manifest (or, with `schema`, of a part of one) as the API server would store it: absent
    fields take their defaults, level by level."""
    schema = _SCHEMA if schema is None else schema
    if isinstance(value, list | tuple):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    filled = dict(value)
    for name, inner in known.items():
        if name not in filled and "default" in inner:
            filled[name] = copy.deepcopy(inner["default"])
    return {name: with_defaults(item, known.get(name, {})) for name, item in filled.items()}


def _values(value: Any, path: tuple[str, ...], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every (place, value) that a rule's path leads to; none where a part of it is absent."""
    if not path:
        yield where, value
    elif path[0] == "[]":
        for index, item in enumerate(value):
            yield from _values(item, path[1:], f"{where}[{index}]")
    elif path[0] in value:
        yield from _values(value[path[0]], path[1:], f"{where}.{path[0]}" if where else path[0])


def manifest_problems(manifest: Any) -> list[str]:
    """Why the API server would refuse this PDCluster, one line each with its path; empty when it would not.
    Rules are looked at only when the schema fits, as the API server does."""
    if not isinstance(manifest, dict):
        return ["the manifest must be a mapping"]
    found = [
        f"{field}: must be {wanted}, not {manifest.get(field)!r}"
        for field, wanted in (("apiVersion", f"{names.GROUP}/{names.VERSION}"), ("kind", names.KIND))
        if manifest.get(field) != wanted
    ]
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        found.append("metadata.name: is required")
    if found:
        return found
    found = problems({key: value for key, value in manifest.items() if key != "metadata"}, _SCHEMA)
    if found:
        return found
    stored = with_defaults(manifest)
    for rule in RULES:
        for where, value in _values(stored, rule.path):
            if not rule.check(value):
                found.append(f"{(where + rule.field_path) or 'metadata.name'}: {rule.message}")
    return found
