"""What prefill keeps of requests that ended is bounded, whatever their metadata."""

from __future__ import annotations

import time
import tracemalloc

from pdtransfer.session.frames import Done, Failed, SlotFilled
from pdtransfer.session.tombstones import FILLED_BYTES, Tombstones

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


def filled(room: int, count: int) -> dict[int, SlotFilled]:
    ids = {"room": room, "attempt": 0, "source": "p" * 32, "destination": "d" * 32}
    return {
        i: SlotFilled(**ids, ticket=i, lane=0, first_region=0, regions=4, first_page=300 * i, pages=300)
        for i in range(1000, 1000 + count)
    }


def test_word_about_filled_slots_counts_and_the_oldest_is_forgotten() -> None:
    """A large request leaves hundreds of them, each for minutes."""
    tombs = Tombstones(60.0, most=25 * FILLED_BYTES)
    ends = [done(room, 0) for room in range(4)]
    for end in ends:
        tombs.add(PEER, None, end, filled(end.room, 10))
    kept = [tombs.get(PEER, end.identity) for end in ends]
    assert [len(tomb.filled) for tomb in kept if tomb is not None] == [0, 0, 10, 10]
    assert [isinstance(tomb.answer, Failed) for tomb in kept if tomb is not None] == [True, True, False, False]
    tombs.expire(time.monotonic() + 61)
    tombs.add(PEER, None, ends[0], filled(0, 25))  # all of the room is there again
    assert len(tombs.get(PEER, ends[0].identity).filled) == 25  # type: ignore[union-attr]


def test_the_bytes_that_one_counts_for_are_what_it_takes() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = filled(1, 2000)
        took = (tracemalloc.get_traced_memory()[0] - before) / len(held)
    finally:
        tracemalloc.stop()
    assert FILLED_BYTES / 2 < took < FILLED_BYTES * 1.5
