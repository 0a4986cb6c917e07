"""Finds SGLang's arguments and environment in a line as people keep it: in a script, a Dockerfile, their notes.

What a shell would do is done where the text alone allows it: quotes, continued lines, assignments, variables and
arrays that the text itself sets. What only the shell that runs it knows is named, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType

from pdtransfer.contract.sglang_cli.config_file import config_arguments
from pdtransfer.contract.sglang_cli.expand import Field
from pdtransfer.contract.sglang_cli.script import Script, Step
from pdtransfer.contract.sglang_cli.shell import ShellUnreadable

_ASSIGNMENT = re.compile(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|\(|\w+|[@*#])|`")
_REFERENCE = re.compile(r"\$\([\w.-]+\)")
_MODULE_FLAG = re.compile(r"-[A-Za-z]*m")
_SETTING = re.compile(r"SGLANG_|NIXL_|UCX_|MC_|HOST_IP$")
_SCRIPT_WORD = re.compile(r"\s")
_NAMES_SGLANG = re.compile(r"launch_server|sglang\.cli\.main|sglang\s+serve")
MAX_TEXT = 1 << 18
MAX_NESTED = 4
"""Scripts within scripts (`ssh HOST "bash -c '...'"`) that are looked into."""


def has_variable(text: str) -> bool:
    """Whether a shell would put something else in its place: `$X`, `${X}`, `$(date)`, or Kubernetes' `$(X)`."""
    return _VARIABLE.search(text) is not None


def has_reference(text: str) -> bool:
    """Whether Kubernetes may put something else in a part of it: `$(X)`, in a container's words and variables."""
    return _REFERENCE.search(text) is not None


class CommandUnreadable(ValueError):
    """The text is no command line of SGLang; the message says why."""


@dataclass(frozen=True)
class Command:
    """One command line. `arguments` are SGLang's own, without the program; a positional model became --model-path.

    `shell_only` are arguments that hold a variable which the text does not set, as written. `notes` say what a shell
    would read otherwise, `assumed` what was taken for granted."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shell_only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def read_command(text: str) -> Command:
    """The one SGLang command in `text`. Raises CommandUnreadable."""
    found = read_commands(text)
    if len(found) > 1:
        raise CommandUnreadable(f"it holds {len(found)} commands of SGLang, one is needed")
    return found[0]


def read_commands(text: str, environment: Mapping[str, str] | None = None) -> tuple[Command, ...]:
    """Every SGLang command in `text`, at least one; arguments without a program are taken as SGLang's. `environment`
    is what the shell that runs it has. Raises CommandUnreadable."""
    if len(text) > MAX_TEXT:
        raise CommandUnreadable(f"it has {len(text)} characters; {MAX_TEXT} are read at most")
    found = _in_script(text, environment or {}, MAX_NESTED)
    if not found:
        raise CommandUnreadable(
            "it holds no command of SGLang: neither `sglang serve` nor `python -m sglang.launch_server`, "
            "nor does it begin with a flag"
        )
    return found


def exec_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[Command, ...]:
    """Every SGLang command that a container runs, given as a list of words (a Dockerfile's CMD, a container's command
    and args), where only Kubernetes' `$(X)` is a variable. Empty for a container of something else. Raises
    CommandUnreadable."""
    known = dict(environment or {})
    fields = [Field(expanded, "$(" in expanded) for expanded in (_kubernetes(w, known) for w in words)]
    return _of_fields(fields, known, MAX_NESTED, alone=True)


def _kubernetes(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), text)


def _in_script(text: str, environment: Mapping[str, str], nested: int) -> tuple[Command, ...]:
    try:
        script = Script(text, environment)
        found: list[Command] = []
        for step in script.steps():
            inside = _of_fields(step.fields, step.environment, nested, alone=script.is_one_command)
            notes = _notes(step)
            assumed = ("the script is run without arguments",) if step.own_arguments else ()
            found += [
                Command(c.arguments, c.environment, c.shell_only, c.notes + notes, c.assumed + assumed) for c in inside
            ]
        return tuple(found)
    except ShellUnreadable as error:
        raise CommandUnreadable(str(error)) from None


def _notes(step: Step) -> tuple[str, ...]:
    """Where the command is not quite what its writer means."""
    notes = [
        f"{name} is set but not exported: SGLang does not see it" for name in sorted(step.kept) if _SETTING.match(name)
    ]
    if step.loose and _arguments_at([f.text for f in step.fields]) is not None:
        notes.append(
            f"the line before {step.loose} does not end with a backslash: a shell ends the command there. It was read "
            "as if it went on"
        )
    return tuple(notes)


def _of_fields(
    fields: Sequence[Field], environment: Mapping[str, str], nested: int, *, alone: bool
) -> tuple[Command, ...]:
    """The commands of SGLang that these words of a command start. `alone`: words without a program are flags."""
    words = [f.text for f in fields]
    start = _arguments_at(words)
    if start is None and alone and _only_arguments(words):
        start = _leading_assignments(words)
    if start is None:
        return _in_a_word(fields, environment, nested)
    known = {**environment, **_assigned(words[:start])}
    arguments = _program_removed(words, start)
    unknown = {f.text for f in fields[start:] if f.open}
    shell_only = tuple(a for a in arguments if a in unknown or re.search(r"\$\(\w+\)", a))
    return (Command(tuple(arguments), MappingProxyType(known), shell_only),)


def _in_a_word(fields: Sequence[Field], environment: Mapping[str, str], nested: int) -> tuple[Command, ...]:
    """What `bash -c SCRIPT`, ssh, tmux and the like start."""
    if not nested:
        return ()
    here = {**environment, **_assigned([f.text for f in fields])}
    found: list[Command] = []
    for each in fields:
        if _SCRIPT_WORD.search(each.text) and _NAMES_SGLANG.search(each.text):
            found += _in_script(each.text, here, nested - 1)
    return tuple(found)


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


def _arguments_at(words: Sequence[str]) -> int | None:
    """Where SGLang's arguments begin after its program; None without one."""
    for index, word in enumerate(words):
        if word == "sglang.launch_server" and index and _MODULE_FLAG.fullmatch(words[index - 1]):
            return index + 1
        name = PurePath(word).name
        if (name == "launch_server.py" and index) or word == "-msglang.launch_server":
            return index + 1
        if name in ("sglang", "sglang.cli.main") and words[index + 1 : index + 2] == ["serve"]:
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
