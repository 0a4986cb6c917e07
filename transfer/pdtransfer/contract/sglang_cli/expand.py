"""What a shell puts in the place of `$X`, as far as the script itself tells.

A variable that the script does not set stays as it is written: only the shell that runs it knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from pdtransfer.contract.sglang_cli.shell import MAX_DEPTH, Part, ShellUnreadable, Word, parts_of

_SIMPLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")
_WITH_DEFAULT = re.compile(r"\$\{(\w+)(:?[-=+])(.*)\}", re.DOTALL)
_ALL_ITEMS = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_OWN_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::[^}]*)?\})")
MAX_WORDS = 1 << 14
MAX_VALUE = 1 << 18
"""Characters; a script of some lines can double a variable until it fills the memory."""


@dataclass(frozen=True, slots=True)
class Field:
    """One argument as a program gets it. `open`: some of it is as written, since only the shell knows it."""

    text: str
    open: bool = False


Value = Field | tuple[Field, ...] | None
"""Of a variable: a text, the items of an array, or None where only the shell knows it."""


class Variables:
    """The variables of a script at some point of it. `own_arguments` is set once the script's own arguments (`$@`) were
    asked for: there are none."""

    def __init__(self, known: Mapping[str, Value] | None = None) -> None:
        self._known: MutableMapping[str, Value] = dict(known or {})
        self.own_arguments = False

    def set(self, name: str, value: Value, *, more: bool = False) -> None:
        """NAME=VALUE, or NAME+=VALUE."""
        if more and name in self._known:
            value = _joined(self._known[name], value)
        self._known[name] = value

    def get(self, name: str) -> Value:
        """None also where it is not set."""
        return self._known.get(name)

    def fields(self, words: Iterable[Word]) -> list[Field]:
        """The arguments that these words become. Raises ShellUnreadable."""
        found: list[Field] = []
        for word in words:
            found += self._split(word.parts, 0)
            if len(found) > MAX_WORDS:
                raise ShellUnreadable(f"a command has more than {MAX_WORDS} words")
        return found

    def text(self, word: Word) -> Field:
        """The value of an assignment: one text. Raises ShellUnreadable."""
        return _one(self._split(tuple(Part(p.text, True, p.expansion) for p in word.parts), 0))

    def _split(self, parts: Sequence[Part], depth: int) -> list[Field]:
        done: list[Field] = []
        here: Field | None = None
        for part in parts:
            pieces = self._pieces(part, depth) if part.expansion else [Field(part.text)]
            if part.expansion and not part.quoted:
                pieces = _at_spaces(pieces)
            if not part.expansion or (part.quoted and not _may_vanish(part.text)):
                here = here or Field("")  # Even an empty quoted text is an argument.
            for index, piece in enumerate(pieces):
                if index and here is not None:
                    done.append(here)
                    here = None
                here = piece if here is None else Field(here.text + piece.text, here.open or piece.open)
                if len(here.text) > MAX_VALUE or len(done) > MAX_WORDS:
                    raise ShellUnreadable(
                        f"a word grows beyond {MAX_VALUE} characters, or a variable's words {MAX_WORDS}"
                    )
        return [*done, here] if here is not None else done

    def _pieces(self, part: Part, depth: int) -> list[Field]:
        """What an expansion becomes, before it is split at spaces. Nothing for an empty array."""
        as_written = [Field(part.text, True)]
        if depth > MAX_DEPTH:
            return as_written
        if _OWN_ARGUMENTS.fullmatch(part.text):
            self.own_arguments = True
            return []
        if simple := _SIMPLE.fullmatch(part.text):
            value = self.get(simple[1] or simple[2] or simple[3])
            if isinstance(value, tuple):
                return [value[0]] if value else [Field("")]
            return as_written if value is None else [value]
        if array := _ALL_ITEMS.fullmatch(part.text):
            value = self.get(array[1])
            if isinstance(value, Field):
                return [value]
            return as_written if value is None else list(value)
        if default := _WITH_DEFAULT.fullmatch(part.text):
            return self._with_default(default, as_written, depth)
        return as_written

    def _with_default(self, found: re.Match[str], as_written: list[Field], depth: int) -> list[Field]:
        """`${X:-text}` and its like. X is taken for not set where the script does not set it."""
        name, how, text = found.groups()
        is_set = name in self._known
        value = self.get(name)
        if is_set and value is None:
            return as_written
        if isinstance(value, tuple):
            value = value[0] if value else Field("")
        empty = not is_set or (how.startswith(":") and value is not None and not value.open and not value.text)
        if how.endswith("+"):
            return [Field("")] if empty else [_one(self._split(_quoted(text), depth + 1))]
        return [_one(self._split(_quoted(text), depth + 1))] if empty or value is None else [value]


def _may_vanish(expansion: str) -> bool:
    """Whether it can become no argument at all, even in quotes."""
    return bool(_ALL_ITEMS.fullmatch(expansion) or _OWN_ARGUMENTS.fullmatch(expansion))


def _quoted(text: str) -> tuple[Part, ...]:
    return tuple(Part(p.text, True, p.expansion) for p in parts_of(text))


def _one(fields: Sequence[Field]) -> Field:
    return Field(" ".join(f.text for f in fields), any(f.open for f in fields))


def _joined(old: Value, more: Value) -> Value:
    if old is None or more is None:
        return None
    if isinstance(old, tuple) or isinstance(more, tuple):
        first = old if isinstance(old, tuple) else (old,)
        return (*first, *(more if isinstance(more, tuple) else (more,)))
    return Field(old.text + more.text, old.open or more.open)


def _at_spaces(pieces: Iterable[Field]) -> list[Field]:
    """Split at spaces, as a shell does outside of quotes. What only the shell knows stays in one piece."""
    found: list[Field] = []
    for piece in pieces:
        found += [piece] if piece.open else [Field(text) for text in piece.text.split()]
    return found
