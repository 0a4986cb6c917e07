"""What decode ranks told a prefill rank about rooms beside the control channel, kept for the sender that it is for.

A room may come again (retraction, a router's retry), and words are not ordered with its senders: what belongs to an
attempt that is over is dropped, so that it does not end the next one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any

from pdtransfer.engines.sglang.messages import GiveUp, Note

MAX_ROOMS = 65536
"""Rooms that are remembered, in each book; the oldest is dropped first."""
EARLY_S = 30.0
"""How much earlier than its sender a room's GiveUp may come: decode gave up while the request was on its way."""


class Told:
    """Notes, GiveUps and the ends of senders, by room. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: OrderedDict[int, Note] = OrderedDict()
        self._given_up: OrderedDict[int, tuple[float, GiveUp]] = OrderedDict()
        self._ended: OrderedDict[int, tuple[str, int] | None] = OrderedDict()
        """Decode incarnation and attempt of the room's last sender; None: it ended before decode was heard of, so
        that one GiveUp is still to come."""

    def hear(self, word: Note | GiveUp) -> None:
        """Keep what is not of an attempt that is over."""
        with self._lock:
            if word.room in self._ended:
                ended = self._ended[word.room]
                if ended is None and isinstance(word, GiveUp):
                    self._end(word.room, (word.destination, word.attempt))
                    return
                if _covers(ended, word):
                    return
            if isinstance(word, Note):
                _put(self._notes, word.room, word)
            else:
                _put(self._given_up, word.room, (time.monotonic(), word))

    def take_note(self, room: int) -> Note | None:
        """That this rank has nothing to send for a room; told once: the next attempt has a note of its own."""
        with self._lock:
            return self._notes.pop(room, None)

    def given_up(self, room: int, since: float) -> GiveUp | None:
        """What decode gave up last in this room, for a sender that was made at `since` (monotonic seconds)."""
        with self._lock:
            found = self._given_up.get(room)
        return found[1] if found is not None and found[0] > since - EARLY_S else None

    def end(self, room: int, asker: tuple[str, int] | None) -> None:
        """A room's sender is over. `asker`: decode's incarnation and attempt, as far as the sender learnt them."""
        with self._lock:
            if asker is None:
                held = self._notes.get(room) or self._given_up.get(room, (0.0, None))[1]
                asker = None if held is None else (held.destination, held.attempt)
            self._end(room, asker)

    def _end(self, room: int, asker: tuple[str, int] | None) -> None:
        _put(self._ended, room, asker)
        note, word = self._notes.get(room), self._given_up.get(room)
        if note is not None and _covers(asker, note):
            del self._notes[room]
        if word is not None and _covers(asker, word[1]):
            del self._given_up[room]


def _covers(asker: tuple[str, int] | None, word: Note | GiveUp) -> bool:
    """The word is of that attempt or an earlier one of the same decode engine."""
    return asker is not None and asker[0] == word.destination and word.attempt <= asker[1]


def _put(book: OrderedDict[int, Any], room: int, value: object) -> None:
    book.pop(room, None)
    book[room] = value
    while len(book) > MAX_ROOMS:
        book.popitem(last=False)
