"""Short pauses of a thread that runs an event loop: as short as asked for, and over when the loop has news."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time

SPINS = 30
EAGER = 4000
"""Turns of a hot loop without news: first only yields, then naps of 50 us, then of 500 us."""
_PR_SET_TIMERSLACK = 29
_POLLIN = 1


class _Pollfd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Napper:
    """Pauses of microseconds, which asyncio has not: epoll rounds up to a millisecond.

    On Linux a nap waits (ppoll) for what the loop's own selector waits for, so a control frame, or a call from
    another thread, ends it. Elsewhere it sleeps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        selector = getattr(loop, "_selector", None)  # asyncio has no public way to it
        fileno = getattr(selector, "fileno", None)  # only of selectors that are one file descriptor: epoll
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._fds = _Pollfd(fileno(), _POLLIN, 0) if self._libc is not None and fileno is not None else None
        self._pause = _Timespec()
        self._news = False

    def sharpen(self) -> None:
        """Call it in the thread that naps. Linux lets a thread's sleeps take 50 us longer, to end several at once:
        pauses of 50 us took 105-110 us (measured), and 51-57 us without that slack."""
        if self._libc is not None:
            self._libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # that it is refused changes nothing else

    def pace(self, quiet: int) -> None:
        """Nap as is right after that many turns without news."""
        if self._news:
            self._news = False  # what ended the last nap was read in this turn, and its reader runs in the next
        elif quiet > SPINS:
            self.nap(50e-6 if quiet < EAGER else 500e-6)

    def nap(self, seconds: float) -> None:
        """Pause for less than a second, or until the loop has something to read or to be called back for by
        another thread. The loop must take its turn before the next nap."""
        if self._libc is None or self._fds is None:
            time.sleep(seconds)
            return
        self._pause.nanoseconds = int(seconds * 1e9)
        ready = self._libc.ppoll(ctypes.byref(self._fds), ctypes.c_ulong(1), ctypes.byref(self._pause), None)
        self._news = ready > 0
