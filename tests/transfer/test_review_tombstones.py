"""What prefill keeps of requests that ended is bounded, whatever their metadata."""

from __future__ import annotations

import time

from pdtransfer.session.frames import Done, Failed
from pdtransfer.session.tombstones import Tombstones

PEER = ("decode-pod", 0)


def done(room: int, size: int) -> Done:
    return Done(room=room, attempt=0, source="p", destination="d", nbytes=1, metadata="A" * size)


def test_the_oldest_metadata_goes_first_and_its_identity_is_still_never_served_again() -> None:
    tombs = Tombstones(60.0, most=10)
    ends = [done(room, 4) for room in range(4)]
    for end in ends:
        tombs.add(PEER, None, end)
    kept = [tombs.get(PEER, end.identity) for end in ends]
    assert all(tomb is not None for tomb in kept)
    answers = [tomb.answer for tomb in kept if tomb is not None]
    assert answers[2:] == ends[2:]
    assert all(isinstance(a, Failed) and a.settled for a in answers[:2])
    tombs.add(PEER, None, ends[3])  # renewed: counted once
    assert tombs.get(PEER, ends[2].identity).answer == ends[2]  # type: ignore[union-attr]
    tombs.expire(time.monotonic() + 61)
    assert all(tombs.get(PEER, end.identity) is None for end in ends)
    tombs.add(PEER, None, done(9, 8))
    assert isinstance(tombs.get(PEER, done(9, 8).identity).answer, Done)  # type: ignore[union-attr]
