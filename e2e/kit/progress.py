"""Progress that a person can follow: one line a step, with its seconds; a live line on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Steps and what happens inside of them."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = ""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A titled, timed step."""
        start = time.monotonic()
        print(f"==> {title}", flush=True)
        try:
            yield
        finally:
            self._end_line()
            self.seconds[title] = time.monotonic() - start
        print(f"    done in {self.seconds[title]:.1f} s", flush=True)

    def say(self, text: str) -> None:
        """What is going on now; repeated text is not printed again."""
        if text == self._last:
            return
        self._last = text
        if self._terminal:
            print(f"\r\033[K    {text[:110]}", end="", flush=True)
        else:
            print(f"    {text}", flush=True)

    def _end_line(self) -> None:
        if self._terminal and self._last:
            print(flush=True)
        self._last = ""
