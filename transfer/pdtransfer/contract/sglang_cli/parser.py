"""Reads SGLang's flags as SGLang's own parser would, without SGLang: argparse over the table of its flags.

Abbreviations, `--flag=value`, the last of several, flags that take a list: all argparse's own. One thing differs:
SGLang ends at the first mistake, here every flag is read by itself, so that one mistake hides nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from pdtransfer.contract.sglang_cli.flags import BY_DEST, FLAGS, OTHERS, READ_FROM, Flag
from pdtransfer.contract.sglang_cli.kinds import Kind, argparse_options

_OURS = ("pdcluster",)
"""What this project's own plugin brings in."""
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True)
class Flags:
    """What a list of arguments sets.

    `values` holds only what was given, by the setting's name (`tp_size`). `problems` are arguments that SGLang
    0.5.23 refuses; `unknown` names the flags among them that it does not have: another version may."""

    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    """Values that only a plugin can have brought in, as `--flag value`; SGLang refuses them without it."""
    hidden: tuple[str, ...] = ()
    """Settings that are given with a value which nobody knows here."""

    def given(self, dest: str) -> bool:
        """Whether the arguments set it, be it to a value that nobody knows here."""
        return dest in self.values or dest in self.hidden

    def get(self, dest: str) -> Any:
        """The value given, else SGLang's default (None for settings that no rule reads)."""
        return self.values[dest] if dest in self.values else BY_DEST[dest].default


class _Refused(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


@cache
def _parser() -> _Parser:
    parser = _Parser(prog="sglang", add_help=False, argument_default=argparse.SUPPRESS)
    for flag in (*FLAGS, *OTHERS):
        if flag.kind is Kind.PAIR:
            parser.add_argument(*flag.names, dest=flag.dest, action="store_const", const=True)
            off = ["--no-" + name.removeprefix("--") for name in flag.names]
            parser.add_argument(*off, dest=flag.dest, action="store_const", const=False)
            continue
        options = argparse_options(flag.kind)
        if flag.choices and not flag.open:
            options["choices"] = flag.choices
        parser.add_argument(*flag.names, dest=flag.dest, **options)
    return parser


@cache
def _names() -> frozenset[str]:
    rows = (*FLAGS, *OTHERS)
    off = {"--no-" + n.removeprefix("--") for f in rows if f.kind is Kind.PAIR for n in f.names}
    return frozenset(n for f in rows for n in f.names) | off


@cache
def _by_name() -> Mapping[str, Flag]:
    rows = (*FLAGS, *OTHERS)
    return {name: f for f in rows for n in f.names for name in (n, "--no-" + n.removeprefix("--"))}


def meant(name: str) -> tuple[str, ...]:
    """Every flag that argparse could take this spelling for: itself, or all it is a beginning of."""
    if name in _names():
        return (name,)
    if name.startswith("--"):
        return tuple(sorted(n for n in _names() if n.startswith(name)))
    return ("-h",) if name.startswith("-h") else ()


def is_flag(argument: str) -> bool:
    """Whether argparse takes this argument for a flag, known or not, rather than for a value."""
    if not argument.startswith("-") or argument == "-":
        return False
    if meant(argument) or meant(argument.partition("=")[0]):
        return True
    return not _NEGATIVE_NUMBER.fullmatch(argument) and " " not in argument


def read_flags(arguments: Sequence[str], hidden: Collection[str] = ()) -> Flags:
    """Every flag of `arguments` (without a program before them). Never raises for any strings.

    `hidden` are those of the arguments that are not known, only as they are written (`$TP`, `--tp=$TP`)."""
    return _read(tuple(arguments), frozenset(hidden))


@lru_cache(maxsize=1024)
def _read(arguments: tuple[str, ...], hidden: frozenset[str]) -> Flags:
    """Kept: an operator asks for the same few lines with every look, and argparse takes milliseconds for each."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    unknown: list[str] = []
    unseen: dict[str, None] = {}
    for group in _groups(arguments):
        name = group[0].partition("=")[0]
        if group[0] == "--" or not is_flag(group[0]):
            problems += [f"{_shown(a)} belongs to no flag" for a in group]
            continue
        if not meant(group[0]) and not meant(name):
            unknown.append(name)
            continue
        setting = _hidden_setting(group, hidden)
        if setting is not None:
            unseen[setting] = None
            values.pop(setting, None)
            continue
        try:
            found, left = _parser().parse_known_args(group)
        except _Refused as refused:
            problems.append(_without_value(str(refused).removeprefix("argument "), group[0]))
            continue
        for setting, value in vars(found).items():
            values[setting] = value
            unseen.pop(setting, None)  # The last one wins.
        stray = ["(not shown)" if _secret(name) else _shown(a) for a in left]
        problems += [f"{a} belongs to no flag" for a in stray]
    problems += [f"{name}: SGLang {READ_FROM} has no such flag{_near(name)}" for name in dict.fromkeys(unknown)]
    foreign = (
        f"{flag.name} {values[flag.dest]}"
        for flag in FLAGS
        if flag.open and flag.dest in values and values[flag.dest] not in (*flag.choices, *_OURS)
    )
    names = tuple(dict.fromkeys(unknown))
    return Flags(MappingProxyType(values), tuple(problems), names, tuple(foreign), tuple(unseen))


def _hidden_setting(group: Sequence[str], hidden: frozenset[str]) -> str | None:
    """The setting of a flag whose value is not known; None where all of it is, or where there is more than a value."""
    name, glued, _ = group[0].partition("=")
    names = meant(name)
    if len({_by_name()[n].dest for n in names}) != 1:
        return None
    flag = _by_name()[names[0]]
    if not flag.kind.takes_value:
        return None
    values = [group[0]] if glued else list(group[1:])
    one = flag.kind in (Kind.TEXT, Kind.INT, Kind.FLOAT, Kind.TOKENS, Kind.JSON)
    if (one and len(group) > (1 if glued else 2)) or not any(v in hidden for v in values):
        return None
    return flag.dest


def _secret(name: str) -> bool:
    """Whether this flag's value must not be repeated."""
    return any(word in full for full in (name, *meant(name)) for word in ("api-key", "password"))


def _shown(argument: str) -> str:
    """A stray argument in a message. NAME=VALUE may be a variable with a secret."""
    name, is_pair, _ = argument.partition("=")
    return repr(f"{name}=..." if is_pair and name.isidentifier() else argument)


def _without_value(problem: str, argument: str) -> str:
    """argparse repeats the whole `--beginning=value` where it could be several flags."""
    name, glued, _ = argument.partition("=")
    return problem.replace(argument, name) if glued and problem.startswith("ambiguous") else problem


def _groups(arguments: Sequence[str]) -> list[list[str]]:
    """Arguments cut before each flag. From `--` on argparse takes everything for values without a flag."""
    groups: list[list[str]] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*groups, list(arguments[index:])]
        if is_flag(argument) or not groups:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def _near(name: str) -> str:
    """A hint for the commonest mistake, underscores."""
    dashed = name.replace("_", "-")
    return f" (it is spelled {dashed})" if dashed in _names() else ""
