"""Finds SGLang's arguments and environment in a line as people keep it: in a script, a Dockerfile, their notes.

What a shell would do is done where the text alone allows it: quotes, continued lines, assignments, variables that
the text itself sets. What only the shell that runs it knows is named, never guessed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType

from pdtransfer.contract.sglang_cli.config_file import config_arguments

_OPERATORS = ";&|<>\n"
_ASSIGNMENT = re.compile(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")
MAX_TEXT = 1 << 18


def has_variable(text: str) -> bool:
    """Whether a shell would put something else in its place: `$X`, `${X}`, or Kubernetes' `$(X)`."""
    return _VARIABLE.search(text) is not None


class CommandUnreadable(ValueError):
    """The text is no command line of SGLang; the message says why."""


@dataclass(frozen=True)
class Command:
    """One command line. `arguments` are SGLang's own, without the program; a positional model became --model-path.

    `shell_only` are arguments that hold a variable which the text does not set, as written."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shell_only: tuple[str, ...] = ()


def read_command(text: str) -> Command:
    """The one SGLang command in `text`. Raises CommandUnreadable."""
    found = read_commands(text)
    if len(found) > 1:
        raise CommandUnreadable(f"it holds {len(found)} commands of SGLang, one is needed")
    return found[0]


def read_commands(text: str) -> tuple[Command, ...]:
    """Every SGLang command in `text`, at least one; arguments without a program are taken as SGLang's. Raises
    CommandUnreadable."""
    if len(text) > MAX_TEXT:
        raise CommandUnreadable(f"it has {len(text)} characters; {MAX_TEXT} are read at most")
    found: list[tuple[list[str], dict[str, str]]] = []
    exported: dict[str, str] = {}
    segments = _segments(text)
    for words in segments:
        start = _arguments_at(words)
        if start is None and len(segments) == 1 and _only_arguments(words):
            start = _leading_assignments(words)
        if start is None:
            inner = _inner_script(words)
            if inner is not None:
                here = exported | _assigned(words)
                found += [(list(c.arguments), here | dict(c.environment)) for c in read_commands(inner)]
            elif words[0] in ("export", "set", "declare") or _leading_assignments(words) == len(words):
                exported |= _assigned(words)
            continue
        found.append((_program_removed(words, start), exported | _assigned(words[:start])))
    if not found:
        raise CommandUnreadable(
            "it holds no command of SGLang: neither `sglang serve` nor `python -m sglang.launch_server`, "
            "nor does it begin with a flag"
        )
    return tuple(_command(arguments, environment) for arguments, environment in found)


def _command(arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
    expanded = [_expand(a, environment) for a in arguments]
    known = {name: _expand(value, environment) for name, value in environment.items()}
    return Command(tuple(expanded), MappingProxyType(known), tuple(a for a in expanded if has_variable(a)))


def with_config(arguments: Sequence[str], read: Callable[[str], Mapping[str, object]]) -> list[str]:
    """Arguments with those of a `--config FILE` before all others, as SGLang puts them; `read` gets the file's name.

    SGLang looks for the word `--config` alone: `--config=FILE` and abbreviations have no effect there. Raises
    CommandUnreadable where SGLang refuses, and what `read` raises."""
    items = list(arguments)
    places = [i for i, a in enumerate(items) if a == "--config"]
    if not places:
        return items
    if len(places) > 1 or places[0] + 1 >= len(items):
        raise CommandUnreadable("--config needs one file, and once")
    at = places[0]
    return config_arguments(read(items[at + 1])) + items[:at] + items[at + 2 :]


def _segments(text: str) -> list[list[str]]:
    """Words of each simple command of a script. Raises CommandUnreadable for quotes that do not close."""
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    # Arguments one a line, without backslashes: a list of them, not a list of commands.
    text = re.sub(r"\n(?=\s*-)", " ", text)
    # A redirect's number (2>) belongs to no flag.
    text = re.sub(r"(?<=\s)[12](?=>)", "", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.whitespace = " \t\r"
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise CommandUnreadable(f"a quote does not close: {error}") from None
    segments: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word and set(word) <= set(_OPERATORS):
            if set(word) & set("<>"):
                skip = True
            else:
                segments.append([])
        else:
            segments[-1].append(word)
    return [s for s in segments if s]


def _arguments_at(words: Sequence[str]) -> int | None:
    """Where SGLang's arguments begin after its program; None without one."""
    for index, word in enumerate(words):
        if word == "sglang.launch_server" and index and words[index - 1] == "-m":
            return index + 1
        name = PurePath(word).name
        if name == "launch_server.py" and index:
            return index + 1
        if name == "sglang" and index + 1 < len(words) and words[index + 1] == "serve":
            return index + 2
        if word == "sglang.cli.main" and words[index + 1 : index + 2] == ["serve"]:
            return index + 2
    return None


def _only_arguments(words: Sequence[str]) -> bool:
    at = _leading_assignments(words)
    return at == len(words) or words[at].startswith("-")


def _leading_assignments(words: Sequence[str]) -> int:
    return next((i for i, w in enumerate(words) if not _ASSIGNMENT.fullmatch(w)), len(words))


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words before a program: the shell's, env's, or of `docker run -e`."""
    return {m[1]: m[2] for w in words if (m := _ASSIGNMENT.fullmatch(w))}


def _inner_script(words: Sequence[str]) -> str | None:
    """The script of `bash -c SCRIPT`."""
    for index, word in enumerate(words[:-1]):
        shell = index and PurePath(words[index - 1]).name in ("bash", "sh", "zsh")
        if shell and re.fullmatch(r"-[a-z]*c", word):
            return words[index + 1]
    return None


def _program_removed(words: Sequence[str], start: int) -> list[str]:
    """Arguments from `start` on; `sglang serve MODEL` as --model-path, its --model-type left out."""
    arguments = list(words[start:])
    if start < 1 or words[start - 1] != "serve":
        return arguments
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--model-type":
            skip = True
        elif not argument.startswith("--model-type="):
            kept.append(argument)
    if kept and not kept[0].startswith("-"):
        kept.insert(0, "--model-path")
    return kept


def _expand(text: str, environment: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        return environment.get(found[1] or found[2] or found[3], found[0])

    return _VARIABLE.sub(value, text)
