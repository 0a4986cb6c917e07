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

MOST_KEPT = 256 << 20
"""Bytes, about, of prefills' metadata and of word about filled slots that are kept to be said again."""
FILLED_BYTES = 1536
"""Of one word about a filled slot (1.4 kB measured): a rank that moves 10 GB/s through slots of 8 MiB makes 300 MB of
them in the time that they are kept."""

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
    """By asking peer and identity; oldest first, each kept `keep` seconds. Of what is to be said again
    (metadata, filled slots) the oldest is forgotten beyond `most` bytes: who asks for that identity again is told
    that it failed."""

    def __init__(self, keep: float, most: int = MOST_KEPT) -> None:
        self._keep = keep
        self._most = most
        self._held: dict[_Key, Tombstone] = {}
        self._sizes: dict[_Key, int] = {}
        """Bytes of those that have something to say, oldest first."""
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
        size = FILLED_BYTES * len(filled or ()) + (len(answer.metadata) if isinstance(answer, Done) else 0)
        if size:
            self._sizes[key] = size
            self._size += size
        while self._size > self._most:
            self._forget(next(iter(self._sizes)))

    def expire(self, now: float) -> None:
        """Drop the old ones."""
        while self._held:
            first = next(iter(self._held))
            if self._held[first].until >= now:
                return
            self._drop(first)

    def _drop(self, key: _Key) -> None:
        self._held.pop(key, None)
        self._size -= self._sizes.pop(key, 0)

    def _forget(self, key: _Key) -> None:
        """What it would say again."""
        held = self._held[key]
        told = "it was sent, and what prefill said at its end is not kept any more"
        failed = Failed(**held.answer.ids, reason="TransferError", message=told, settled=True)
        self._held[key] = replace(held, answer=failed, filled={})
        self._size -= self._sizes.pop(key)
