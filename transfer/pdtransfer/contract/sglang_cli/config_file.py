"""A YAML file of `--config`, as the arguments that SGLang 0.5.23 makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pdtransfer.contract.sglang_cli.flags import FLAGS, OTHERS, Flag
from pdtransfer.contract.sglang_cli.kinds import Kind

_DEPRECATED_SWITCHES = frozenset({"disable_cuda_graph", "enable_dp_attention"})
"""Switches that SGLang marks as deprecated: its config file does not take them."""


class ConfigRefused(ValueError):
    """SGLang ends with an error on this file; the message names the entry."""


def config_arguments(config: Mapping[str, object]) -> list[str]:
    """Arguments of the file's top-level mapping, in its order. Raises ConfigRefused."""
    arguments: list[str] = []
    for key, value in config.items():
        if not isinstance(key, str):
            raise ConfigRefused(f"its key {key!r} is no text")
        flag = _by_key(key.replace("-", "_"))
        if flag is not None and (flag.kind is Kind.PAIR or flag.dest in _DEPRECATED_SWITCHES):
            raise ConfigRefused(f"its key {key} is not supported in a config file")
        if isinstance(value, bool):
            if flag is None or flag.kind is not Kind.SWITCH:
                arguments += [f"--{key}", str(value).lower()]
            elif value:
                arguments.append(f"--{key}")
        elif isinstance(value, list):
            if value:
                arguments += [f"--{key}", *(str(v) for v in value)]
        elif isinstance(value, Mapping):
            try:
                arguments += [f"--{key}", json.dumps(value)]
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigRefused(f"its key {key} holds what JSON does not have: {error}") from None
        else:
            arguments += [f"--{key}", str(value)]
    return arguments


def _by_key(key: str) -> Flag | None:
    """The flag with this key: the setting's name, or any of its names with underscores."""
    for flag in (*FLAGS, *OTHERS):
        names = {n.removeprefix("--").replace("-", "_") for n in flag.names if n.startswith("--")}
        if key == flag.dest or key in names:
            return flag
    return None
