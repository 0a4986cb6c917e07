"""Who may get which room's bytes, and for which request: reuse, duplicates, second askers, shared errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kv_world import BOOTSTRAP, QUICK, READY, TOKENS, ask, give, until

from pdtransfer.contract.base import Role
from pdtransfer.errors import Aborted, LayoutMismatch, RoomTaken
from pdtransfer.session.api import Timeouts, TransferState
from pdtransfer.session.frames import MAX_METADATA, MAX_PAGES

SUCCESS, FAILED = TransferState.SUCCESS, TransferState.FAILED


def test_an_identity_used_again_for_the_same_pages_never_succeeds_without_its_bytes(world):
    (prefill,), (decode,) = world.pair()
    first = ask(decode, 1, [4])
    give(prefill, 1, [1])
    assert first.wait(30) is SUCCESS
    decode.pool.fill(2, [4])  # the page is another request's now
    again = ask(decode, 1, [4])  # the same room, attempt, pages and tokens
    prefill.pool.fill(3, [1])
    give(prefill, 1, [1])
    state = again.wait(30)
    if state is SUCCESS:
        assert decode.pool.holds(1, [4])
    else:
        assert isinstance(again.error, Aborted) and "used for another request" in str(again.error)
        assert until(lambda: again.pages_releasable)


def test_a_room_used_again_with_a_new_attempt_is_served_anew(world):
    (prefill,), (decode,) = world.pair()
    for attempt in range(3):
        receiver = ask(decode, 1, [4], attempt=attempt)
        decode.pool.fill(9, [4])
        give(prefill, 1, [1])
        assert receiver.wait(30) is SUCCESS, receiver.error
        assert decode.pool.holds(1, [4])


def test_a_chunk_handed_over_twice_does_not_stand_for_one_that_is_missing(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5])
    prefill.pool.fill(1, [1, 2])
    sender = prefill.endpoint.send(room=1, tokens=2 * TOKENS - 1)
    sender.chunk([1], 0, READY)
    sender.chunk([1], 0, READY)
    sender.finish(b"")
    assert receiver.wait(30) is FAILED and "1 of 2 pages" in str(receiver.error)
    assert sender.wait(30) is FAILED


def test_chunks_that_overlap_or_come_in_any_order_move_each_page_once(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4, 5, 6, 7])
    prefill.pool.fill(1, [1, 2, 3, 8])
    sender = prefill.endpoint.send(room=1, tokens=4 * TOKENS - 1)
    for pages, first in (([3, 8], 2), ([2, 3], 1), ([1, 2], 0)):
        sender.chunk(pages, first, READY)
    sender.finish(b"m")
    assert receiver.wait(30) is SUCCESS, receiver.error
    assert decode.pool.holds(1, [4, 5, 6, 7]) and decode.pool.untouched([4, 5, 6, 7])


def test_a_room_goes_to_one_decode_engine_and_the_next_one_is_refused_by_name(world):
    prefill = world.rank(Role.PREFILL)
    one, two = (
        world.rank(
            Role.DECODE,
            incarnation=f"decode-{i}",
            card=lambda c, i=i: c.model_copy(update={"pod_uid": f"decode-pod-{i}"}),
        )
        for i in (1, 2)
    )
    world.wire([prefill], [one, two])
    prefill.agent.faults.delay_polls = 30
    first = ask(one, 1, [4])
    assert until(lambda: prefill.endpoint.inflight == 1)
    second = ask(two, 1, [6])
    assert second.wait(30) is FAILED and isinstance(second.error, RoomTaken), second.error
    sender = give(prefill, 1, [1])
    assert first.wait(30) is SUCCESS and sender.wait(30) is SUCCESS
    assert one.pool.holds(1, [4]) and two.pool.untouched([])
    assert until(lambda: second.pages_releasable)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_second_decode_incarnation_with_the_same_room_gets_its_own_bytes_or_a_reason(world, in_flight):
    """Decode is replaced after it asked: the same room and attempt again must not be taken for the first one's."""
    short = replace(QUICK, waiting=3)  # a room that its first asker's end has ended is waited for that long
    (prefill,), (first,) = world.pair(timeouts=short)
    old = ask(first, 1, [4, 5])
    assert until(lambda: prefill.endpoint.inflight == 1)
    sender = None
    if in_flight:
        prefill.agent.faults.stall_all = True
        sender = give(prefill, 1, [1, 2])
        assert until(lambda: prefill.agent.faults.seen)
    second = world.rank(Role.DECODE, incarnation="decode-2", timeouts=short)
    for rank in (prefill, second):
        rank.endpoint.apply_peers([(second if rank is prefill else prefill).endpoint.card])
    for rank in (prefill, second):
        assert rank.endpoint.wait_wired(20)
    prefill.agent.faults.stall_all = False
    again = ask(second, 1, [4, 5])
    world.hub.unstall(prefill.agent.name)
    sender = sender or give(prefill, 1, [1, 2])
    if again.wait(30) is SUCCESS:
        assert second.pool.holds(1, [4, 5]) and sender.wait(30) is SUCCESS
    else:
        assert again.error is not None and again.metadata is None, again.error
        assert until(lambda: again.pages_releasable)
        assert second.pool.untouched([])
    assert old.wait(30) is not SUCCESS
    retried = ask(second, 1, [6, 7], attempt=1)
    give(prefill, 1, [1, 2])
    assert retried.wait(30) is SUCCESS, retried.error
    assert second.pool.holds(1, [6, 7]) and second.pool.untouched([4, 5, 6, 7])


def test_each_failed_request_names_its_own_room(world):
    (prefill,), (decode,) = world.pair()
    receivers = [ask(decode, room, [room]) for room in (1, 2, 3)]
    assert until(lambda: prefill.endpoint.inflight == 3)
    senders = [prefill.endpoint.send(room=room, tokens=TOKENS - 1) for room in (1, 2, 3)]
    rooms = prefill.endpoint._source._rooms.open
    assert until(lambda: len(rooms) == 3 and all(room.legs for room in list(rooms.values())))
    for rank in (decode, prefill):
        rank.endpoint.apply_peers([])
    for transfers in (receivers, senders):
        for room, transfer in enumerate(transfers, 1):
            assert transfer.wait(30) is FAILED
            assert transfer.error.room == room, transfer.error


def test_metadata_and_page_lists_over_the_frames_bound_are_refused_by_name_and_harm_nobody(world):
    (prefill,), (decode,) = world.pair()
    receiver = ask(decode, 1, [4])
    sender = give(prefill, 1, [1], metadata=b"x" * (MAX_METADATA + 1))
    assert sender.wait(30) is FAILED and isinstance(sender.error, LayoutMismatch)
    assert receiver.wait(30) is FAILED and "metadata" in str(receiver.error)
    with pytest.raises(LayoutMismatch, match="pages"):
        decode.endpoint.receive(
            room=2, attempt=0, bootstrap=BOOTSTRAP, pages=range(MAX_PAGES + 1), tokens=(MAX_PAGES + 1) * TOKENS
        )
    assert prefill.endpoint.failed is None and decode.endpoint.failed is None
    receiver = ask(decode, 3, [6])
    give(prefill, 3, [1], metadata=b"x" * MAX_METADATA)
    assert receiver.wait(30) is SUCCESS and receiver.metadata == b"x" * MAX_METADATA


def test_a_transfer_that_begins_while_the_endpoint_ends_fails_and_never_waits(world):
    quick = Timeouts(waiting=30, transfer=30, settle=0.2, connect=1, probe=5)
    (prefill,), (decode,) = world.pair(timeouts=quick)
    lost = []
    for rank in (prefill, decode):
        # The engine's call is queued, but the thread ends before it takes it up.
        rank.endpoint._core.call = lambda *_: None
    lost.append(prefill.endpoint.send(room=1, tokens=TOKENS))
    lost.append(ask(decode, 1, [4]))
    for rank in (prefill, decode):
        del rank.endpoint._core.call
        rank.endpoint.close()
    for transfer in lost:
        assert transfer.wait(20) is FAILED and "closed" in str(transfer.error)
