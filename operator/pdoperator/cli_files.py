"""Reads what `pdcluster preflight` is given in files: texts, a model's config.json, YAML configs."""

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


def read_text(path: str) -> str:
    """Content of a file, or of standard input for `-`. Raises Unreadable."""
    try:
        if path == "-":
            return sys.stdin.read(MAX_FILE)
        file = Path(path)
        if file.is_file() and file.stat().st_size > MAX_FILE:
            raise Unreadable(f"{path} is larger than {MAX_FILE >> 20} MiB")
        return file.read_text()
    except OSError as error:
        raise Unreadable(f"{path} can not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} can not be read: it is not UTF-8 text") from error


def read_yaml_config(path: str) -> Mapping[str, Any]:
    """A file of SGLang's `--config`. Raises Unreadable."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise Unreadable(f"--config {path}: SGLang takes files that end in .yaml or .yml")
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise Unreadable(f"--config {path}: it is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise Unreadable(f"--config {path}: a mapping of flags is needed, not {type(content).__name__}")
    return content


def model_geometry(config: str | None, source: str | None, overrides: str | None = None) -> ModelGeometry | None:
    """Geometry from the config.json at `config`, else from the folder `source` if it lies on this machine. `overrides`
    is the JSON of --json-model-override-args. Raises Unreadable naming the file and the field."""
    if config is None:
        if not source:
            return None
        found = Path(source) / "config.json"
        if not found.is_file():
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
    except ValueError as error:
        raise Unreadable(f"{config}: {error}") from error
