"""Makes odd inputs of valid ones: by bytes, and by the structure of JSON. Seeded; knows no format but JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 63, 64, 65, 255, 256, 1000, 4095, 4096),
    *(2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**48 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70),
    *(-(2**31), -(2**63), 10**30, 0.5, -0.0, 1e308, -1e-308),
)
OTHER: tuple[Any, ...] = (None, True, False, "", [], {}, [[]], {"": None}, [None] * 100)
WORDS = (
    *("\x00", "é", "\u2028", "🙂" * 50, "a" * 5000, "../../etc/passwd", "-1", "1e999", "NaN", "Infinity", "null"),
    *("127.0.0.1:0", "[::1]:99999", ":", "host:", "AAAA", "====", "aGk=", "%s%n{0}", "prefill", "decode", "VRAM"),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b",", b":", b"null", b"NaN", b"-", b"1e999"),
    *(b"\x00", b"\xff", b"\xff\xfe", b"\n", b"\r\n\r\n", b"\xed\xa0\x80", b"[" * 64, b'{"a":' * 64),
)

LARGEST = 1 << 20
"""Bytes of an input."""


class Mutator:
    """`next()` gives the next input, made of one or two of `corpus` (which may grow)."""

    def __init__(self, corpus: Sequence[bytes], seed: int) -> None:
        self.corpus = list(corpus)
        self._rng = random.Random(seed)
        self._room = 1
        """How many times a part may be repeated."""

    def next(self) -> bytes:
        rng = self._rng
        data = rng.choice(self.corpus)
        self._room = LARGEST // (len(data) + 1)
        if rng.random() < 0.6:
            data = self._by_structure(data)
        if rng.random() < 0.45:
            data = self._by_bytes(data)
        return data

    # --- JSON ---------------------------------------------------------------------------------

    def _by_structure(self, data: bytes) -> bytes:
        """One line (or the whole) as JSON, with one to four of its values changed."""
        lines = data.split(b"\n")
        at = self._rng.randrange(len(lines))
        head, body = self._split(lines[at])
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return data
        for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
            value = self._change(value)
        lines[at] = head + json.dumps(value, ensure_ascii=self._rng.random() < 0.9).encode("utf-8", "surrogatepass")
        if self._rng.random() < 0.1:
            lines.insert(at, lines[at])
        if self._rng.random() < 0.1:
            self._rng.shuffle(lines)
        made = b"\n".join(lines)
        return made if len(made) <= LARGEST else data

    @staticmethod
    def _split(line: bytes) -> tuple[bytes, bytes]:
        start = min((i for i in (line.find(b"{"), line.find(b"[")) if i >= 0), default=0)
        return line[:start], line[start:]

    def _change(self, value: Any) -> Any:
        """A copy of `value` in which one node, chosen by a random walk, is another."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.93:
            key = rng.choice(list(value))
            changed = dict(value)
            how = rng.random()
            if how < 0.08:
                del changed[key]
            elif how < 0.12:
                changed[rng.choice((key + "x", "", "__class__", rng.choice(WORDS)))] = changed.pop(key)
            elif how < 0.16:
                changed[key] = rng.choice(list(value.values()))
            else:
                changed[key] = self._change(value[key])
            return changed
        if isinstance(value, list) and value and rng.random() < 0.93:
            at = rng.randrange(len(value))
            changed_list = list(value)
            how = rng.random()
            if how < 0.1:
                del changed_list[at]
            elif how < 0.2:
                changed_list.insert(at, changed_list[at])
            elif how < 0.24:
                changed_list = changed_list * min(rng.choice((2, 17, 300)), max(1, self._room))
            elif how < 0.3:
                rng.shuffle(changed_list)
            else:
                changed_list[at] = self._change(changed_list[at])
            return changed_list
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        rng = self._rng
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
            return value + rng.choice((-1, 1, -value, value, 2**31, 2**63))
        if isinstance(value, str) and value and rng.random() < 0.4:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(WORDS) + value[at + rng.randrange(2) :]
        how = rng.random()
        if how < 0.45:
            return rng.choice(NUMBERS)
        if how < 0.7:
            return rng.choice(WORDS)
        if how < 0.75:
            nested: Any = value
            for _ in range(rng.choice((3, 60, 300))):
                nested = [nested] if rng.random() < 0.5 else {"text_config": nested}
            return nested
        return rng.choice(OTHER)

    # --- bytes --------------------------------------------------------------------------------

    def _by_bytes(self, data: bytes) -> bytes:
        rng = self._rng
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            at = rng.randrange(len(made) + 1)
            how = rng.randrange(6)
            if how == 0 and at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del made[at : at + rng.choice((1, 2, 8, 64))]
            elif how == 2:
                made[at:at] = rng.choice(TOKENS)
            elif how == 3:
                made[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            elif how == 4:
                other = rng.choice(self.corpus)
                cut = rng.randrange(len(other) + 1)
                made[at:] = other[cut:]
            else:
                made = made[:at]
        return bytes(made[:LARGEST])
