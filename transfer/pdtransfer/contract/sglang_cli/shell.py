"""Splits a shell script into simple commands and their words, without running anything.

What bash's grammar says of quotes, comments, continued lines, redirections, substitutions and arrays. Two things are
more lenient, since people keep command lines in notes and YAML too: a line that begins with a flag goes on with the
line before it, and the lines of a here-document are commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE = " \t\r"
_OPERATORS = ";&|<>()"
_GOES_ON = re.compile(r"\n(?:[ \t\r]*(?:#[^\n]*)?\n)*(?=[ \t]*--?[A-Za-z])")
_FENCE = re.compile(r"(?m)^[ \t]*```.*$")
"""Of a block of code in Markdown."""
_PLAIN = re.compile(r"[^ \t\r\n\\'\"$`;&|<>()]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_NAME = re.compile(r"\w+|[@*#?!$-]")
_ARRAY = re.compile(r"(?:--env=)?[A-Za-z_]\w*\+?=")
_ESCAPED_IN_QUOTES = '$`"\\\n'
MAX_DEPTH = 20
"""Substitutions within one another that are read."""


class ShellUnreadable(ValueError):
    """The text is no shell script; the message says where."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: text, or an expansion as it is written (`$X`, `${X:-1}`, `$(date)`)."""

    text: str
    quoted: bool = False
    expansion: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command. `items` are those of an array that it assigns (`X=(a b)`), else None."""

    parts: tuple[Part, ...]
    items: tuple[Word, ...] | None = None

    @property
    def written(self) -> str:
        """Without its quotes, nothing expanded."""
        return "".join(p.text for p in self.parts)


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """Words up to the next operator. `loose` is the first word that only a lenient reader counts in, '' for none: the
    line before it does not end with a backslash."""

    words: tuple[Word, ...]
    loose: str = ""


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def commands(self) -> list[SimpleCommand]:
        found: list[SimpleCommand] = []
        words: list[Word] = []
        loose_at: int | None = None
        skip = False  # The next word is where a redirection goes.

        def end() -> None:
            nonlocal words, loose_at
            if words:
                loose = words[loose_at].written if loose_at is not None and loose_at < len(words) else ""
                found.append(SimpleCommand(tuple(words), loose))
            words, loose_at = [], None

        while (char := self._next()) is not None:
            if char == "\n":
                goes_on = _GOES_ON.match(self.text, self.at) if words else None
                if goes_on:
                    self.at = goes_on.end()
                    loose_at = len(words) if loose_at is None else loose_at
                else:
                    self.at += 1
                    end()
                skip = False
            elif char in _OPERATORS:
                run = self._while(_OPERATORS)
                skip = bool(set(run) & set("<>"))
                if not skip:
                    end()
            else:
                word = self._word()
                redirected = (
                    self._peek() in ("<", ">") and word.written.isdigit() and not any(p.quoted for p in word.parts)
                )
                if skip:
                    skip = False
                elif not redirected:
                    words.append(word)
        end()
        return found

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _while(self, chars: str) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in chars:
            self.at += 1
        return self.text[start : self.at]

    def _next(self) -> str | None:
        """The next character that is no space and in no comment, not taken yet."""
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] in _SPACE:
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return self.text[self.at]
        return None

    def _word(self, *, arrays: bool = True) -> Word:
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _SPACE or char == "\n":
                break
            if arrays and char == "(" and _ARRAY.fullmatch("".join(p.text for p in parts)):
                return Word(tuple(parts), self._array())
            if char in _OPERATORS:
                break
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                parts.append(Part(plain[0]))
                self.at = plain.end()
            elif char == "\\":
                if not self.text.startswith("\\\n", self.at):
                    parts.append(Part(self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif char == "'":
                parts.append(Part(self._until("'"), quoted=True))
            elif char == '"':
                parts += self._double()
            else:
                parts.append(self._expansion(quoted=False))
        return Word(tuple(parts))

    def _array(self) -> tuple[Word, ...]:
        """From `(` to its `)`."""
        start, self.at = self.at, self.at + 1
        items: list[Word] = []
        while (char := self._next()) is not None:
            if char == ")":
                self.at += 1
                return tuple(items)
            if char == "\n" or char in _OPERATORS:
                self.at += 1
                continue
            items.append(self._word(arrays=False))  # They hold no arrays.
        raise ShellUnreadable(f"a parenthesis does not close: {self._where(start)}")

    def _until(self, quote: str) -> str:
        """What stands between two of these quotes, from the first on."""
        start = self.at
        end = self.text.find(quote, start + 1)
        if end < 0:
            raise ShellUnreadable(f"a quote does not close: {self._where(start)}")
        self.at = end + 1
        return self.text[start + 1 : end]

    def _double(self) -> list[Part]:
        """The parts of a text in double quotes."""
        start, self.at = self.at, self.at + 1
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return parts or [Part("", quoted=True)]
            if char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped != "\n":
                    parts.append(Part(escaped if escaped in _ESCAPED_IN_QUOTES else "\\" + escaped, quoted=True))
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                plain = _QUOTED.match(self.text, self.at)
                assert plain is not None  # Every other character is one of its.
                parts.append(Part(plain[0], quoted=True))
                self.at = plain.end()
        raise ShellUnreadable(f"a quote does not close: {self._where(start)}")

    def _expansion(self, *, quoted: bool) -> Part:
        """From `$` or a backtick on."""
        start = self.at
        if self.text[start] == "`":
            inner = self._until("`")
            return Part(f"`{inner}`", quoted, expansion=True)
        after = self.text[start + 1 : start + 2]
        if after in ("(", "{"):
            self._balanced(after, ")" if after == "(" else "}")
            return Part(self.text[start : self.at], quoted, expansion=True)
        name = _NAME.match(self.text, start + 1)
        if name is None:
            self.at += 1
            return Part("$", quoted)
        # $12 is $1 and a 2.
        end = start + 2 if after.isdigit() else name.end()
        self.at = end
        return Part(self.text[start:end], quoted, expansion=True)

    def _balanced(self, opening: str, closing: str) -> None:
        start, depth = self.at, 0
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "'" and opening == "(":
                self._until("'")
                continue
            elif char == opening:
                depth += 1
                if depth > MAX_DEPTH:
                    break
            elif char == closing:
                depth -= 1
                if not depth:
                    self.at += 1
                    return
            self.at += 1
        raise ShellUnreadable(f"{self.text[start : start + 2]} does not close: {self._where(start)}")

    def _where(self, at: int) -> str:
        line = self.text.count("\n", 0, at) + 1
        return f"line {line}"


def simple_commands(text: str) -> list[SimpleCommand]:
    """The commands of `text`, in order. Raises ShellUnreadable."""
    return _Reader(_FENCE.sub("", text.replace("\r\n", "\n"))).commands()


def parts_of(text: str) -> tuple[Part, ...]:
    """The parts of a text that is one word whatever stands in it, such as what follows `:-` in an expansion. Raises
    ShellUnreadable."""
    reader = _Reader(text)
    parts: list[Part] = []
    while reader.at < len(text):
        at = reader.at
        parts += reader._word().parts
        if reader.at == at:
            parts.append(Part(text[at]))
            reader.at += 1
    return tuple(parts)
