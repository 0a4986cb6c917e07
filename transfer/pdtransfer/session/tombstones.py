"""Identities that ended on the prefill side, for as long as a request for them may still arrive.

An abort may overtake its request, and a request may be repeated after a reconnect: neither may be
served (again). The answer is repeated instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pdtransfer.peers import PeerKey
from pdtransfer.session.api import Identity
from pdtransfer.session.frames import AbortAck, Done, Failed, Request


@dataclass(frozen=True)
class Tombstone:
    """How an identity ended, and the hash of its request (0: none came; a page list may be long)."""

    request: int
    answer: Done | Failed | AbortAck
    until: float


class Tombstones:
    """By asking peer and identity; oldest first, each kept `keep` seconds."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._held: dict[tuple[PeerKey, Identity], Tombstone] = {}

    def get(self, peer: PeerKey, identity: Identity) -> Tombstone | None:
        """How it ended, if it did."""
        return self._held.get((peer, identity))

    def add(self, peer: PeerKey, request: Request | None, identity: Identity, answer: Done | Failed | AbortAck) -> None:
        """Keep (or renew) one."""
        self._held.pop((peer, identity), None)  # so that the oldest is always first
        self._held[(peer, identity)] = Tombstone(hash(request) if request else 0, answer, time.monotonic() + self._keep)

    def expire(self, now: float) -> None:
        """Drop the old ones."""
        while self._held:
            first = next(iter(self._held))
            if self._held[first].until >= now:
                return
            del self._held[first]
