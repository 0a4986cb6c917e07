"""Checks a value against a structural schema, the subset that Kubernetes' CRDs use.

For manifests that no API server has seen yet (`pdcluster preflight`), and for the parts of a spec that
are plain dicts. It knows only what our schemas use, and refuses a schema that uses more.
"""

from __future__ import annotations

import re
from typing import Any

_KNOWN = frozenset(
    {
        "type", "description", "properties", "required", "additionalProperties", "items", "enum", "pattern",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minLength", "maxLength", "minItems", "maxItems", "minProperties",
        "maxProperties", "format", "default", "nullable",
        "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string", "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-validations",
    }
)  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def problems(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """What is wrong with `value`, one line each with its path; empty when it fits. CEL is not evaluated."""
    unknown = set(schema) - _KNOWN
    if unknown:
        raise ValueError(f"schema keyword not supported: {', '.join(sorted(unknown))}")
    where = path or "value"
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            return [f"{where}: must be an integer or a string"]
        return _string(str(value), schema, where)
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where}: must be of type {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: must be one of {', '.join(map(str, schema['enum']))}"]
    if isinstance(value, dict):
        return _object(value, schema, path)
    if isinstance(value, list | tuple):
        return _array(value, schema, path)
    if isinstance(value, str):
        return _string(value, schema, where)
    return _number(value, schema, where)


def _bounds(size: float, low: Any, high: Any, what: str, where: str) -> list[str]:
    found = []
    if low is not None and size < low:
        found.append(f"{where}: {what} must be at least {low}")
    if high is not None and size > high:
        found.append(f"{where}: {what} must be at most {high}")
    return found


def _string(value: str, schema: dict[str, Any], where: str) -> list[str]:
    found = _bounds(len(value), schema.get("minLength"), schema.get("maxLength"), "length", where)
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not match {schema['pattern']}")
    return found


def _number(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("exclusiveMinimum") and value == low:
        return [f"{where}: it must be more than {low}"]
    if schema.get("exclusiveMaximum") and value == high:
        return [f"{where}: it must be less than {high}"]
    return _bounds(value, low, high, "it", where)


def _array(value: list[Any] | tuple[Any, ...], schema: dict[str, Any], path: str) -> list[str]:
    found = _bounds(len(value), schema.get("minItems"), schema.get("maxItems"), "items", path or "value")
    for index, item in enumerate(value):
        found += problems(item, schema.get("items", {}), f"{path}[{index}]")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    seen: set[tuple[str, ...]] = set()
    for item in value if keys else ():
        # As text: a key can be of any type here, and is refused as one elsewhere.
        key = tuple(str(item.get(name)) for name in keys) if isinstance(item, dict) else ()
        if key in seen:
            found.append(f"{path or 'value'}: duplicate {', '.join(key)}")
        seen.add(key)
    return found


def _object(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    where = path or "value"
    found = _bounds(len(value), schema.get("minProperties"), schema.get("maxProperties"), "fields", where)
    found += [f"{where}: {name} is required" for name in schema.get("required", ()) if name not in value]
    known = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    for name, item in value.items():
        inner = f"{path}.{name}" if path else str(name)
        if name in known:
            found += problems(item, known[name], inner)
        elif isinstance(extra, dict):
            found += problems(item, extra, inner)
        elif not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.append(f"{inner}: unknown field")
    return found
