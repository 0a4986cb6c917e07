"""Reads what `pdcluster preflight` is given in files: texts, a model's config.json, YAML.

Whatever the file holds, the answer is its content or Unreadable, in a bounded time and memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pdoperator.cli_output import Unreadable
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.hf_config import read_geometry

MAX_FILE = 16 << 20
MAX_NODES = 1 << 20
"""Values in a YAML file, those that an alias repeats counted again."""


def read_text(path: str) -> str:
    """Content of a file, or of standard input for `-`. Raises Unreadable."""
    if not path:
        raise Unreadable("the name of a file is needed")
    try:
        if path == "-":
            text = sys.stdin.read(MAX_FILE + 1)
        else:
            # What the file says about its size is no limit: a pipe has none, and /dev/zero does not end.
            with Path(path).open(encoding="utf-8-sig") as file:
                text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise Unreadable(f"{path} can not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} can not be read: it is not UTF-8 text") from error
    except ValueError as error:
        raise Unreadable(f"{path!r} can not be read: {error}") from error
    if len(text) > MAX_FILE:
        raise Unreadable(f"{path} is larger than {MAX_FILE >> 20} MiB")
    return text


def read_yaml_documents(text: str) -> list[Any]:
    """The documents of a YAML (or JSON) text that are not empty. Raises Unreadable."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise Unreadable(f"it is not YAML: {error}") from error
    except RecursionError as error:
        raise Unreadable("it is nested too deeply") from error
    except ValueError as error:  # A date such as 2020-13-41.
        raise Unreadable(f"it is not YAML: {error}") from error
    _bounded(documents)
    return documents


def _bounded(documents: list[Any]) -> None:
    """A few aliases of aliases make a text of 1 KiB into more than fits in memory once it is walked through."""
    count, stack = 0, list(documents)
    while stack:
        value = stack.pop()
        count += 1
        if count > MAX_NODES:
            raise Unreadable("it is too large, or holds itself")
        if isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def read_yaml_config(path: str) -> Mapping[str, Any]:
    """A file of SGLang's `--config`. Raises Unreadable."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise Unreadable(f"--config {path}: SGLang takes files that end in .yaml or .yml")
    try:
        documents = read_yaml_documents(read_text(path))
    except Unreadable as error:
        raise Unreadable(f"--config {path}: {error}") from error
    if len(documents) > 1:
        raise Unreadable(f"--config {path}: it holds {len(documents)} documents, one is needed")
    content = documents[0] if documents else {}
    if not isinstance(content, Mapping):
        raise Unreadable(f"--config {path}: a mapping of flags is needed, not {type(content).__name__}")
    return content


def model_geometry(config: str | None, source: str | None, overrides: str | None = None) -> ModelGeometry | None:
    """Geometry from the config.json at `config`, else from the folder `source` if it lies on this machine. `overrides`
    is the JSON of --json-model-override-args. Raises Unreadable naming the file and the field."""
    if config is None:
        if not source:
            return None
        found = Path(source, "config.json")
        try:
            if not found.is_file():
                return None
        except (OSError, ValueError):  # A name that no file can have, or a folder that is closed to us.
            return None
        config = str(found)
    text = read_text(config)
    try:
        content = json.loads(text)
        if overrides:
            changed = json.loads(overrides)
            if not isinstance(changed, dict):
                raise ValueError("--json-model-override-args is no JSON object")
            content = {**content, **changed} if isinstance(content, dict) else content
        return read_geometry(content)
    except RecursionError as error:
        raise Unreadable(f"{config}: it is nested too deeply") from error
    except ValueError as error:
        raise Unreadable(f"{config}: {error}") from error


def draft_layers(source: str | None) -> int | None:
    """Layers of the draft model in the folder `source`, if it lies on this machine. Raises Unreadable."""
    shape = model_geometry(None, source)
    return shape.layers if shape is not None else None
