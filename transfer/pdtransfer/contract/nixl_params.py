"""Reads SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS as SGLang does."""

from __future__ import annotations

import json


def parse_nixl_params(text: str) -> tuple[dict[str, str], str]:
    """(parameters, problem). `''` is an empty object; a problem says what is wrong with the text."""
    if not text:
        return {}, ""
    try:
        value = json.loads(text)
    except ValueError as error:
        return {}, f"is no JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"is a JSON {type(value).__name__}, not an object"
    for name, one in value.items():
        if not isinstance(one, str):
            return {}, f"has {name!r} with the value {one!r}, which is no string"
    return value, ""
