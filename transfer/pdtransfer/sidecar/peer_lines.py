"""A rank's part of the roster, read card by card.

To validate a card takes milliseconds (an 80-layer pool: 160 regions and tens of KB of NIXL metadata), and the
interpreter does nothing else meanwhile: read at once, the line of a large fleet would stop the endpoint's
thread, and with it every transfer, for a second. So the sidecar puts a TAB around each card (JSON
allows it as white space, and never within a string), a card that was read before is not read again, and
between the others this thread rests while something moves.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.link import Peers, SidecarMessage, sidecar_messages

MARK = b"\t"
SHARE = 0.25
"""Part of the time that reading takes while something moves."""
LONGEST = 2.0
"""Seconds of rest that one line may cost in all: a heartbeat is due."""


class PeerLines:
    """`busy()` says that something moves; `rest(seconds)` waits, and may end early."""

    def __init__(self, busy: Callable[[], bool], rest: Callable[[float], object]) -> None:
        self._busy = busy
        self._rest = rest
        self._read: dict[bytes, RankCard] = {}
        """Cards of the last roster by the hash of their text."""

    def message(self, line: bytes) -> SidecarMessage:
        """A message of the sidecar. Raises pydantic's ValidationError."""
        head, *cards = line.split(MARK)
        tail = cards.pop() if cards else b""
        ours = head.endswith(b'"peers":[') and tail.rstrip() == b"]}" and all(c == b"," for c in cards[1::2])
        message = sidecar_messages.validate_json(head + tail if ours and cards else line)
        if isinstance(message, Peers) and ours:
            return message.model_copy(update={"peers": tuple(self._cards(cards[::2]))})
        return message

    def _cards(self, texts: list[bytes]) -> list[RankCard]:
        found: dict[bytes, RankCard] = {}
        cards, left = [], LONGEST
        for text in texts:
            key = hashlib.blake2b(text, digest_size=16).digest()
            card = found.get(key) or self._read.get(key)
            if card is None:
                began = time.monotonic()
                card = RankCard.model_validate_json(text)
                pause = min(left, (time.monotonic() - began) * (1 / SHARE - 1))
                if pause > 0 and self._busy():
                    left -= pause
                    self._rest(pause)
            found[key] = card
            cards.append(card)
        self._read = found
        return cards
