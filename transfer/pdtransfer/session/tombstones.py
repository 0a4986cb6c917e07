"""Identities that ended on the prefill side, for as long as a request for them may still arrive.

An abort may overtake its request, and a request may be repeated after a reconnect: neither may be
served (again). The answer is repeated instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdtransfer.peers import PeerKey
from pdtransfer.session.api import Identity
from pdtransfer.session.frames import AbortAck, Done, Failed, Request, SlotFilled

MOST_METADATA = 256 << 20
"""Characters of prefills' metadata that are kept to be said again."""

_Key = tuple[PeerKey, Identity]


@dataclass(frozen=True)
class Tombstone:
    """How an identity ended, and the hash of its request (0: none came; a page list may be long)."""

    request: int
    answer: Done | Failed | AbortAck
    until: float
    filled: Mapping[int, SlotFilled] = field(default_factory=dict)
    """Slots that it filled, by ticket: decode may not have heard of them."""


class Tombstones:
    """By asking peer and identity; oldest first, each kept `keep` seconds. Beyond `most` characters of metadata
    the oldest is forgotten: who asks for that identity again is told that it failed."""

    def __init__(self, keep: float, most: int = MOST_METADATA) -> None:
        self._keep = keep
        self._most = most
        self._held: dict[_Key, Tombstone] = {}
        self._metadata: dict[_Key, int] = {}
        """Characters of those that have some, oldest first."""
        self._size = 0

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
        self._drop(key)  # so that the oldest is always first
        until = time.monotonic() + self._keep
        self._held[key] = Tombstone(hash(request) if request else 0, answer, until, filled or {})
        if isinstance(answer, Done) and answer.metadata:
            self._metadata[key] = len(answer.metadata)
            self._size += len(answer.metadata)
        while self._size > self._most:
            self._forget(next(iter(self._metadata)))

    def expire(self, now: float) -> None:
        """Drop the old ones."""
        while self._held:
            first = next(iter(self._held))
            if self._held[first].until >= now:
                return
            self._drop(first)

    def _drop(self, key: _Key) -> None:
        self._held.pop(key, None)
        self._size -= self._metadata.pop(key, 0)

    def _forget(self, key: _Key) -> None:
        """Its metadata."""
        held = self._held[key]
        told = "it was sent, and what prefill said at its end is not kept any more"
        failed = Failed(**held.answer.ids, reason="TransferError", message=told, settled=True)
        self._held[key] = replace(held, answer=failed)
        self._size -= self._metadata.pop(key)
