"""Goes through a shell script command by command: what each gets as arguments and as environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdtransfer.contract.sglang_cli.expand import Field, Variables
from pdtransfer.contract.sglang_cli.shell import SimpleCommand, Word, simple_commands

_NAMED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPORTS = frozenset({"export", "declare", "typeset", "local", "readonly", "set", "ENV", "ARG"})
"""Commands that set variables; ENV and ARG are a Dockerfile's."""
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_LEADS = frozenset({"then", "else", "elif", "do", "!", "time", "if", "while", "until", "{"})
"""Words that a command can stand behind."""


@dataclass(frozen=True)
class Step:
    """One command: its arguments, and the environment it finds. `kept` are variables that are set but not exported,
    `loose` is as in SimpleCommand, `own_arguments` true where it gets those of the script."""

    fields: tuple[Field, ...]
    environment: Mapping[str, str]
    kept: frozenset[str] = frozenset()
    loose: str = ""
    own_arguments: bool = False


class Script:
    """A script, and the environment of the shell that runs it."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        """Raises ShellUnreadable."""
        self._commands = simple_commands(text)
        self._variables = Variables({name: Field(value, "$" in value) for name, value in environment.items()})
        self._exported = set(environment)
        self._set_here: set[str] = set()
        self._every_one = False  # set -a
        self._depth = 0

    @property
    def is_one_command(self) -> bool:
        """It is no script but a line."""
        return len(self._commands) == 1

    def steps(self) -> Iterator[Step]:
        """Every command that is no assignment, in order; what a block assigns is not known behind it, since it may
        not run. Once only. Raises ShellUnreadable."""
        for command in self._commands:
            words = self._enter(command.words)
            if words and not self._assign(words, command):
                yield self._step(words, command)
            if command.words[0].written in _CLOSES:
                self._depth = max(0, self._depth - 1)

    def _enter(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """The words of the command itself, behind `then` and the like."""
        at = 0
        while at < len(words):
            word = words[at].written
            self._depth += word in _OPENS
            if word not in _LEADS:
                break
            at += 1
        return words[at:]

    def _assign(self, words: tuple[Word, ...], command: SimpleCommand) -> bool:
        """Takes note of a command that only assigns; False for any other."""
        head = words[0].written
        if head in _EXPORTS:
            if head == "set" and any("a" in w.written for w in words[1:] if w.written.startswith("-")):
                self._every_one = True
            marked = head in ("export", "ENV") or any(w.written == "-x" for w in words[1:])
            if head == "ENV" and len(words) > 2 and not _NAMED.match(words[1].written):
                self._set(words[1].written, self._variables.text(words[2]), more=False, exported=True)
            for word in words[1:]:
                self._assigned(word, exported=marked)
            return True
        if all(_NAMED.match(w.written) for w in words) and not (self.is_one_command and command.loose):
            for word in words:
                self._assigned(word, exported=False)
            return True
        return False

    def _assigned(self, word: Word, *, exported: bool) -> None:
        found = _NAMED.match(word.written)
        if found is None:
            if exported and re.fullmatch(r"[A-Za-z_]\w*", word.written):
                self._exported.add(word.written)
            return
        if word.items is not None:
            value: Field | tuple[Field, ...] = tuple(self._variables.fields(word.items))
        else:
            whole = self._variables.text(word)
            value = Field(whole.text[found.end() :], whole.open)
        self._set(found[1], value, more=bool(found[2]), exported=exported)

    def _set(self, name: str, value: Field | tuple[Field, ...], *, more: bool, exported: bool) -> None:
        self._variables.set(name, None if self._depth else value, more=more)
        self._set_here.add(name)
        if exported or self._every_one:
            self._exported.add(name)

    def _step(self, words: tuple[Word, ...], command: SimpleCommand) -> Step:
        self._variables.own_arguments = False
        fields = tuple(self._variables.fields(words))
        kept = frozenset(self._set_here - self._exported)
        return Step(fields, self._environment(), kept, command.loose, self._variables.own_arguments)

    def _environment(self) -> dict[str, str]:
        found = {}
        for name in self._exported:
            value = self._variables.get(name)
            if not isinstance(value, tuple):
                found[name] = f"${name}" if value is None else value.text
        return found
