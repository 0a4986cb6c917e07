"""Reads SGLang's `--disaggregation-ib-device`: names for all GPUs, or a JSON object with names for each.

Formula: sglang.srt.distributed.device_communicators.mooncake_transfer_engine.parse_ib_device_config.
"""

from __future__ import annotations

import json
from typing import Any

FILE_SUFFIX = ".json"
"""A value that ends so is a file on the node, with such an object."""


def is_map(given: str) -> bool:
    """Whether the text itself is a JSON object, and no file and no list of names."""
    return given.startswith("{") and not given.endswith(FILE_SUFFIX)


def parse_map(text: str) -> tuple[dict[int, str], str]:
    """(names by GPU id, problem) of a JSON object; a problem says what SGLang refuses in it."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"it is no JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"it is a JSON {type(value).__name__}, not an object"
    found: dict[int, str] = {}
    for key, names in value.items():
        number = _number(key)
        if number is None or not isinstance(names, str):
            return {}, f"a GPU's number and a string of names are needed, not {key[:40]!r}: {str(names)[:40]!r}"
        found[number] = names.strip()
    return found, "" if found else "it names no GPU"


def _number(key: str) -> int | None:
    try:
        return int(key) if key.isdigit() else None
    except ValueError:  # digits that are no decimal ones, or thousands of them
        return None
