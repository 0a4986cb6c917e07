"""Identities that ended on the prefill side, for as long as a request for them may still arrive.

An abort may overtake its request, and a request may be repeated after a reconnect: neither may be
served (again). The answer is repeated instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdtransfer.peers import PeerKey
from pdtransfer.session.api import Identity
from pdtransfer.session.frames import AbortAck, Done, Failed, Request, SlotFilled


@dataclass(frozen=True)
class Tombstone:
    """How an identity ended, and the hash of its request (0: none came; a page list may be long)."""

    request: int
    answer: Done | Failed | AbortAck
    until: float
    filled: Mapping[int, SlotFilled] = field(default_factory=dict)
    """Slots that it filled, by ticket: decode may not have heard of them."""


class Tombstones:
    """By asking peer and identity; oldest first, each kept `keep` seconds."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._held: dict[tuple[PeerKey, Identity], Tombstone] = {}

    def get(self, peer: PeerKey, identity: Identity) -> Tombstone | None:
        """How it ended, if it did."""
        return self._held.get((peer, identity))

    def add(
        self,
        peer: PeerKey,
        request: Request | None,
        answer: Done | Failed | AbortAck,
        filled: Mapping[int, SlotFilled] | None = None,
    ) -> None:
        """Keep (or renew) one."""
        key = (peer, answer.identity)
        self._held.pop(key, None)  # so that the oldest is always first
        until = time.monotonic() + self._keep
        self._held[key] = Tombstone(hash(request) if request else 0, answer, until, filled or {})

    def expire(self, now: float) -> None:
        """Drop the old ones."""
        while self._held:
            first = next(iter(self._held))
            if self._held[first].until >= now:
                return
            del self._held[first]
