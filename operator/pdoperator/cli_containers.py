"""SGLang's commands in what Kubernetes and Docker start containers with: manifests, lists of words, Dockerfiles."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pdoperator.cli_files import read_yaml_documents
from pdoperator.cli_output import Unreadable
from pdtransfer.contract.sglang_cli import Command, exec_command, read_commands

_YAML = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*[ \t]*(?:---|\[|\{|- |[A-Za-z][\w./-]*:(?:\s|$))")
"""How a text begins that is YAML or JSON, and no shell script."""
_EXEC_FORM = re.compile(r"(?m)^[ \t]*(CMD|ENTRYPOINT)[ \t]+(\[.*\])[ \t]*$")
MAX_DEPTH = 40


def commands_in(text: str) -> tuple[Command, ...]:
    """Every SGLang command in a shell script, a Dockerfile, a list of words or a Kubernetes manifest; at least one.
    Raises Unreadable, CommandUnreadable."""
    if not _YAML.match(text):
        return read_commands(_dockerfile(text))
    found: list[Command] = []
    for document in read_yaml_documents(text):
        if isinstance(document, list) and all(isinstance(w, str | int | float) for w in document):
            found += exec_command([str(w) for w in document])
            continue
        for container in _containers(document, 0):
            found += exec_command(_words(container), _environment(container))
    if not found:
        raise Unreadable(
            "it is YAML, but no list of words and no manifest with a container that starts SGLang (`sglang serve` or "
            "`python -m sglang.launch_server`)"
        )
    return tuple(found)


def _containers(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Every object with a command or args, wherever a manifest has it (Pod, Deployment, LeaderWorkerSet ...)."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        if any(isinstance(value.get(key), list) for key in ("command", "args")):
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _containers(item, depth + 1)


def _words(container: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("command", "args"):
        words = container.get(key) or []
        if not isinstance(words, list) or not all(isinstance(w, str | int | float) for w in words):
            raise Unreadable(f"{key} of container {container.get('name', '(no name)')} is no list of words")
        found += [str(w) for w in words]
    return found


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables of the container; one whose value only the cluster knows has the value `$(its name)`."""
    found: dict[str, str] = {}
    entries = container.get("env")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            name = entry["name"]
            found[name] = f"$({name})" if "valueFrom" in entry else _value(entry.get("value"))
    return found


def _value(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _dockerfile(text: str) -> str:
    """The text with each `CMD ["a", "b"]` as a shell would be given it. CMD are the arguments of an ENTRYPOINT."""
    entry: list[str] = []

    def plain(found: re.Match[str]) -> str:
        try:
            words = json.loads(found[2])
        except (ValueError, RecursionError):
            return found[0]
        if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
            return found[0]
        if found[1] == "ENTRYPOINT":
            entry[:] = words
            return shlex.join(words)
        return shlex.join([*entry, *words])

    changed = _EXEC_FORM.sub(plain, text)
    # Where both are there, the ENTRYPOINT alone is not what is started.
    both = entry and any(found[1] == "CMD" for found in _EXEC_FORM.finditer(text))
    return changed.replace(shlex.join(entry) + "\n", "\n", 1) if both else changed
